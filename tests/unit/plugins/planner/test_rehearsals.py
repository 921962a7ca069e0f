"""A rehearsal in its process: what it answers, and what a caller reads when it cannot."""

import json
import shutil
from pathlib import Path

import pytest

from agentrl.config.loading import build_config
from agentrl.errors import ConfigError
from agentrl.plugins.planner import rehearsals
from agentrl.plugins.planner.rehearsals import rehearsed_rank

DEMO = Path("assets/demo/model").absolute()
CONFIG = build_config({"model_name_or_path": str(DEMO)})


def test_a_model_that_cannot_be_rehearsed_is_an_error_of_one_line(tmp_path: Path) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)
    assert rehearsed_rank(CONFIG, tmp_path, on_gpu=False).weights > 0
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "hidden_size": "wide"}))
    with pytest.raises(ConfigError, match=r"cannot rehearse a step of this model: .*hidden_size"):
        rehearsed_rank(CONFIG, tmp_path, on_gpu=False)


def test_a_process_that_ends_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsals, "_MODULE", "agentrl.errors")  # it answers nothing
    with pytest.raises(ConfigError, match="cannot rehearse a step of this model: the rehearsal"):
        rehearsed_rank(CONFIG, DEMO, on_gpu=False)
