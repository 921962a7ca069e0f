"""Rehearsals in their process: what they answer, and what a caller reads when they cannot."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from agentrl.config.loading import build_config
from agentrl.errors import ConfigError
from agentrl.plugins.planner.rehearsals import rehearsals

DEMO = Path("assets/demo/model").absolute()
CONFIG = build_config({"model_name_or_path": str(DEMO)})


def test_one_process_rehearses_again_after_a_model_that_it_cannot(tmp_path: Path) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    with rehearsals(tmp_path, on_gpu=False) as opened:
        whole = opened.rank(CONFIG)
        (tmp_path / "config.json").write_text(json.dumps({**described, "hidden_size": "wide"}))
        with pytest.raises(
            ConfigError, match=r"cannot rehearse a step of this model: .*hidden_size"
        ):
            opened.rank(CONFIG)
        (tmp_path / "config.json").write_text(json.dumps(described))
        assert opened.rank(CONFIG) == whole
    assert whole.weights > 0


def test_a_process_that_is_killed_is_an_error_of_one_line() -> None:
    with rehearsals(DEMO, on_gpu=False) as opened:
        os.kill(opened._process.process_id, signal.SIGHUP)
        with pytest.raises(
            ConfigError, match="cannot rehearse a step of this model: the rehearsal"
        ):
            opened.rank(CONFIG)
