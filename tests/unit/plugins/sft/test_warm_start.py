import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from support.demo_run import ROOT

from agentrl.config.loading import load_config
from agentrl.errors import AgentRLError
from agentrl.launcher.cluster.gpu_placement import NO_GPUS
from agentrl.plugins.sft import warm_start


async def test_a_fine_tuning_that_exits_with_zero_before_its_end_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump({"train_file": str(ROOT / "examples/shop/demonstrations.py")}))
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "What is 2 + 3?", "answer": "5"}')
    config = load_config(
        {
            "train_file": str(questions),
            "output_dir": str(tmp_path / "output"),
            "logs_dir": str(tmp_path / "logs"),
            "warm_start": str(path),
        }
    )
    ended = [sys.executable, "-c", "import os; print('so far', flush=True); os._exit(0)"]
    monkeypatch.setattr(warm_start, "trainer_command", lambda *_, **__: ended)
    prepared = warm_start.warm_start(config)
    assert prepared is not None
    console = Console(record=True)
    with pytest.raises(AgentRLError, match=r"sft exited with status 0 before its end; .*so far$"):
        await prepared(console, config, NO_GPUS)
    told = " ".join(console.export_text().split())
    assert "demonstrations.py asks without the sentence that the run adds to its questions" in told
