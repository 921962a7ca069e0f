"""An evaluation of a checkpoint that is an adapter."""

import json
from pathlib import Path

from agentrl.config.sections import ModelSection
from agentrl.launcher.evaluation_run import newest_checkpoint, serving


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
