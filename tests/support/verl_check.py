"""Runs where verl is installed: has verl read the files of a run, and play one rollout.

`python verl_check.py RUN_FOLDER [play]` prints what it found as one line of JSON. No GPU: the policy is
the demo model, sampled by transformers where verl would ask its servers.
"""

import asyncio
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.dataset.rl_dataset import RLHFDataset


class Servers:
    """Stands in for verl's client of inference servers, which need a GPU."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls: list[tuple[list[int], list[int]]] = []

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        """Sample greedily."""
        given = torch.tensor([prompt_ids])
        with torch.no_grad():
            ids = self.model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=48, do_sample=False
            )[0].tolist()[len(prompt_ids) :]
        self.calls.append((list(prompt_ids), ids))
        return SimpleNamespace(
            token_ids=ids, log_probs=[-0.5] * len(ids), num_preempted=0, extra_fields={}
        )


def main() -> None:
    """Check everything in the folder."""
    folder = sys.argv[1]
    sys.path.insert(0, folder)
    with initialize_config_dir(folder, version_base=None):
        config = compose("final_trainer")
    validate_config(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )
    path = config.actor_rollout_ref.model.path
    tokenizer = AutoTokenizer.from_pretrained(path)
    data = RLHFDataset(config.data.train_files, tokenizer, config.data)
    (entry,) = OmegaConf.load(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    assert data[0]["agent_name"] == entry.name
    servers = Servers(AutoModelForCausalLM.from_pretrained(path))
    found: dict[str, Any] = {"adv_estimator": config.algorithm.adv_estimator}

    async def run() -> AgentLoopOutput | None:
        made = instantiate(
            config=entry,
            trainer_config=DictConfigWrap(config=config),
            server_manager=servers,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
        )
        found["loop"] = type(made).__name__
        found["agent"] = made.agent.workers.settings.agent
        if sys.argv[2:] != ["play"]:
            return None
        return await made.run({"temperature": 0.0}, raw_prompt=data[0]["raw_prompt"])

    reward = get_custom_reward_fn(config)
    assert reward is not None

    async def judge(*texts: str) -> list[float]:
        return [await reward("gaia", text, "17", extra_info={}) for text in texts]

    output = asyncio.run(run())
    found["right"], found["wrong"] = asyncio.run(judge("<answer>17</answer>", "17"))
    if output is not None:
        found |= {
            "prompt_ids": output.prompt_ids,
            "response_ids": output.response_ids,
            "response_mask": output.response_mask,
            "logprobs": output.response_logprobs,
            "calls": servers.calls,
        }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


main()
