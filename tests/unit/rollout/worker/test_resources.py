import dataclasses
from pathlib import Path

import pytest
from support.chat_families import FAMILIES, write_family

from agentrl.config.sections import InferenceSection, SamplingSection
from agentrl.errors import ConfigError
from agentrl.renderers import Renderer
from agentrl.rollout.worker.resources import check_tools, served_context_length
from agentrl.tools import ToolSpec

QWEN25 = FAMILIES["qwen25"].source
SPECS = [ToolSpec("look", "", {"type": "object", "properties": {}}, "s", "look")]


def renderer_with(directory: Path, template: str) -> Renderer:
    write_family(directory, "qwen25")
    (directory / "chat_template.jinja").write_text(template)
    return Renderer.load(directory)


def test_a_template_without_results_of_tools_is_refused_if_there_are_tools(tmp_path: Path) -> None:
    renderer = renderer_with(tmp_path, QWEN25.replace('message.role == "tool"', "false"))
    check_tools(SamplingSection(), None, renderer, [])
    with pytest.raises(ConfigError, match="the model's chat template does not render tool results"):
        check_tools(SamplingSection(), None, renderer, SPECS)


def test_it_is_said_where_a_system_prompt_describes_the_tools(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = renderer_with(tmp_path / "whole", QWEN25)
    check_tools(SamplingSection(), None, whole, SPECS)
    assert not caplog.records
    renderer = renderer_with(tmp_path / "without", QWEN25.replace("if tools", "if false"))
    check_tools(SamplingSection(), None, renderer, SPECS)
    assert "does not render tools; describing them in the system prompt" in caplog.text


@pytest.mark.parametrize("limit", ["max_prompt_tokens", "context_length", "model"])
def test_tools_that_leave_no_room_in_a_prompt_are_refused(tmp_path: Path, limit: str) -> None:
    renderer = renderer_with(tmp_path, QWEN25)
    huge = dataclasses.replace(SPECS[0], description="about it " * 2000)
    sampling, inference = SamplingSection(), InferenceSection()

    def check(specs: list[ToolSpec]) -> None:
        check_tools(sampling, served_context_length(inference, tmp_path), renderer, specs)

    check([huge])
    if limit == "model":
        (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    elif limit == "context_length":
        inference = InferenceSection(context_length=4096)
    else:
        sampling = SamplingSection(max_prompt_tokens=4096)
    with pytest.raises(ConfigError, match=r"1 tools take \d+ tokens to describe, and a prompt may"):
        check([huge])
    check(SPECS)
