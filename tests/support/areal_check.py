"""Runs where areal is installed: has AReaL read the files of a run, and play one episode.

`python areal_check.py RUN_FOLDER WORKFLOW` prints what it found as one line of JSON. No GPU: the
policy is the demo model, sampled by transformers where AReaL would ask its inference servers.
"""

import asyncio
import json
import os
import sys
from typing import Any

import torch
from areal.api import ModelRequest, ModelResponse, RolloutWorkflow
from areal.api.cli_args import PPOConfig, parse_cli_args, to_structured_cfg
from areal.infra.workflow_executor import check_trajectory_format
from areal.utils.dynamic_import import import_from_string
from datasets import Dataset
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

VERSION = 3


class Engine:
    """Stands in for AReaL's inference engine, whose servers need a GPU."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls: list[tuple[list[int], list[int]]] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Sample."""
        given = torch.tensor([request.input_ids])
        with torch.no_grad():
            ids = self.model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=request.gconfig.max_new_tokens,
                do_sample=True,
                temperature=request.gconfig.temperature,
                eos_token_id=request.gconfig.stop_token_ids,
            )[0].tolist()[len(request.input_ids) :]
        self.calls.append((list(request.input_ids), ids))
        return ModelResponse(
            input_tokens=request.input_ids,
            output_tokens=ids,
            output_logprobs=[-0.5] * len(ids),
            output_versions=[VERSION] * len(ids),
        )


def main() -> None:
    """Check everything in the folder."""
    folder, workflow_name = sys.argv[1:]
    sys.path.insert(0, folder)
    composed, _ = parse_cli_args(["--config", f"{folder}/areal.yaml"])
    config = OmegaConf.to_object(to_structured_cfg(composed, PPOConfig))
    assert isinstance(config, PPOConfig)
    data = Dataset.from_json(config.train_dataset.path)
    cls = import_from_string(workflow_name)
    assert issubclass(cls, RolloutWorkflow)
    workflow = cls(gconfig=config.gconfig, tokenizer=config.tokenizer_path)
    torch.manual_seed(0)
    engine = Engine(AutoModelForCausalLM.from_pretrained(config.actor.path))
    episode = asyncio.run(workflow.arun_episode(engine, data[0]))
    assert episode is not None
    assert check_trajectory_format(episode)
    found = {key: value.tolist() for key, value in episode.items()}
    found |= {
        "types": {key: str(value.dtype) for key, value in episode.items()},
        "calls": engine.calls,
        "grouped_by_areal": config.gconfig.n_samples,
        "fileroots": [config.saver.fileroot, config.cluster.fileroot],
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


main()
