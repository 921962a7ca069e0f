from pathlib import Path

import pytest
from support.chat_families import QWEN25, write_family

from agentrl.errors import ConfigError
from agentrl.renderers import Renderer
from agentrl.rollout.resources import check_template
from agentrl.tools import ToolSpec

SPECS = [ToolSpec("look", "", {"type": "object", "properties": {}}, "s", "look")]


def renderer_with(directory: Path, template: str) -> Renderer:
    write_family(directory, "qwen25")
    (directory / "chat_template.jinja").write_text(template)
    return Renderer.load(directory)


def test_a_template_without_results_of_tools_is_refused_if_there_are_tools(tmp_path: Path) -> None:
    renderer = renderer_with(tmp_path, QWEN25.replace("message.role == 'tool'", "false"))
    check_template(renderer, [])
    with pytest.raises(ConfigError, match="the model's chat template shows no results of tools"):
        check_template(renderer, SPECS)


def test_a_template_that_names_no_tools_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_template(renderer_with(tmp_path / "whole", QWEN25), SPECS)
    assert not caplog.records
    renderer = renderer_with(tmp_path / "without", QWEN25.replace("if tools", "if false"))
    check_template(renderer, SPECS)
    assert "does not say which tools there are" in caplog.text
