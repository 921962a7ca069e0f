"""What servers are started with when adapters are to come."""

import json
from pathlib import Path

import pytest

from agentrl.config.sections import InferenceSection, ModelSection
from agentrl.inference.supervisor.server_commands import server_command
from agentrl.launcher.evaluation_run import newest_checkpoint, serving


@pytest.mark.parametrize("lora_rank", [0, 8])
def test_sglang_makes_room_for_adapters_only_where_there_are_to_be_any(
    lora_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "agentrl.inference.supervisor.server_commands.sglang_python", lambda: "python"
    )
    command = server_command(
        InferenceSection(inference_backend="sglang"),
        ModelSection(lora_rank=lora_rank, lora_target_modules=("q_proj", "v_proj")),
        model_path=Path("/model"),
        port=30000,
        version=0,
        seed=0,
    )
    line = " ".join(command)
    wanted = "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj v_proj"
    assert (wanted in line) == bool(lora_rank)
    assert ("lora" in line) == bool(lora_rank)


def test_an_adapter_is_evaluated_on_servers_of_its_base_model(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/000003/model"
    folder.mkdir(parents=True)
    said = {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["v_proj", "q_proj"],
        "base_model_name_or_path": "owner/base",
    }
    (folder / "adapter_config.json").write_text(json.dumps(said))
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint == folder
    model = serving(ModelSection(), checkpoint)
    assert (model.model_name_or_path, model.lora_rank, model.lora_alpha) == ("owner/base", 8, 16)
    assert model.lora_target_modules == ("q_proj", "v_proj")
    whole = serving(ModelSection(), tmp_path)
    assert (whole.model_name_or_path, whole.lora_rank) == (str(tmp_path), 0)
