"""The code that runs inside AReaL: its training process, and the workflow that runs rollouts.

`python -m agentrl.plugins.integrations.areal.areal_training WORKFLOW --config FILE` trains. Its workflow
runs a group of rollouts of the user's agent and returns them as tensors; the agent calls an
OpenAI-compatible endpoint in this process, which samples through AReaL's inference engine.

Imports AReaL and torch, so only generated modules import it.
"""

import asyncio
import json
import logging
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from areal import workflow_context
from areal.api import ModelRequest, RolloutWorkflow
from areal.api.cli_args import PPOConfig, load_expr_config
from areal.utils import stats_tracker

from agentrl.errors import AgentWorkerError, UserCodeError
from agentrl.models.checkpoints.resolve import resolve_model
from agentrl.plugins.integrations.agent_worker.engine_session import EngineAgent
from agentrl.plugins.integrations.agent_worker.token_chains import (
    RecordedRollout,
    SampledTokens,
    TokenChain,
)
from agentrl.plugins.integrations.question_rows import reward_inputs
from agentrl.renderers import Renderer
from agentrl.schema import MCPTask

_MAX_ATTEMPTS = 3
_EPSILON = 1e-6

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _ScoredRollout:
    chains: list[TokenChain]
    reward: float


class AgentGroupWorkflow(RolloutWorkflow):  # type: ignore[misc]  # AReaL has no types
    """Runs the agent of a generated subclass, in worker processes.

    An episode is a whole group. AReaL's own grouping and normalization of rewards count rows, but a
    rollout has one row per conversation of its agent. Rewards are therefore normalized here, over
    the rollouts of the group, and every row receives the reward of its rollout.
    """

    agent: ClassVar[EngineAgent]
    n_samples: ClassVar[int]
    timeout_seconds: ClassVar[float] = 1200.0

    def __init__(self, gconfig: Any, tokenizer: str) -> None:
        """Store the sampling parameters and the tokenizer."""
        self.gconfig = gconfig
        self.tokenizer = tokenizer

    @cached_property
    def renderer(self) -> Renderer:
        """The model's chat template and tokenizer."""
        return Renderer.load(resolve_model(self.tokenizer))

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run a question `n_samples` times, or once with the raw reward in an evaluation.

        Returns:
            For B conversations of at most L tokens: `input_ids` and `loss_mask` int32 [B, L],
            `logprobs` float32 [B, L], `versions` int32 [B, L] (-1 where nothing was sampled),
            `attention_mask` bool [B, L], `rewards` float32 [B]. None if fewer than two rollouts
            were scored; AReaL then skips the question.
        """
        question = json.loads(data["question"])
        is_eval = workflow_context.get().is_eval
        num_rollouts = 1 if is_eval else self.n_samples
        rollouts = await asyncio.gather(
            *(self._run_with_retries(engine, question) for _ in range(num_rollouts))
        )
        scored = [rollout for rollout in rollouts if rollout is not None]
        if len(scored) < min(2, num_rollouts):
            return None
        for rollout in scored:
            stats_tracker.get(workflow_context.stat_scope()).scalar(reward=rollout.reward)
        rewards = torch.tensor([rollout.reward for rollout in scored], dtype=torch.float64)
        if not is_eval:
            rewards = (rewards - rewards.mean()) / (rewards.std(correction=0) + _EPSILON)
        return _tensors(
            [
                (chain, float(reward))
                for rollout, reward in zip(scored, rewards, strict=True)
                for chain in rollout.chains
            ]
        )

    async def _run_with_retries(
        self, engine: Any, question: dict[str, Any]
    ) -> _ScoredRollout | None:
        """Run and score one rollout; None if every attempt failed."""
        for _ in range(_MAX_ATTEMPTS):
            try:
                rollout = await self._run_once(engine, question)
            except AgentWorkerError as error:
                log.warning("a rollout failed: %s", error)
                continue
            if rollout is not None:
                return rollout
        return None

    async def _run_once(self, engine: Any, question: dict[str, Any]) -> _ScoredRollout | None:
        """Run and score one rollout; None if the agent never called the model."""
        max_tokens = self.gconfig.max_tokens
        rollout = RecordedRollout(
            self.renderer, lambda ids: self._generate(engine, ids), max_tokens
        )
        task = MCPTask(
            id=secrets.token_hex(8),
            query=str(question.get("query", question.get("question"))),
            system_prompt=str(question.get("system_prompt") or ""),
            dataset_id=str(question.get("id") or ""),
        )
        answer: str | None = None
        try:
            async with asyncio.timeout(self.timeout_seconds):
                answer = await self.agent.run(task, rollout.answer)
        except (UserCodeError, TimeoutError) as error:
            # A failure of the agent itself scores 0, unless it never called the model.
            log.info("the agent failed: %s", error)
        chains = rollout.chains.sampled()
        if not chains:
            return None
        if answer is None or not answer.strip():
            return _ScoredRollout(chains, 0.0)
        try:
            arguments = {**reward_inputs(question), "solution_str": answer}
            return _ScoredRollout(chains, await self.agent.workers.reward(arguments))
        except UserCodeError as error:
            # A defect of the reward function must not score 0, so the rollout is repeated.
            raise AgentWorkerError(f"reward_func: {error}") from error

    async def _generate(self, engine: Any, ids: list[int]) -> SampledTokens:
        num_remaining = self.gconfig.max_tokens - len(ids)
        gconfig = self.gconfig.new(
            n_samples=1,
            max_new_tokens=min(self.gconfig.max_new_tokens, num_remaining),
            stop_token_ids=sorted(self.renderer.stop_token_ids),
        )
        request = ModelRequest(rid=secrets.token_hex(16), input_ids=ids, gconfig=gconfig)
        response = await engine.agenerate(request)
        return SampledTokens(
            response.output_tokens, response.output_logprobs, response.output_versions
        )


def _tensors(rows: list[tuple[TokenChain, float]]) -> dict[str, Any]:
    length = max(len(chain.ids) for chain, _ in rows)
    shape = (len(rows), length)
    tensors = {
        "input_ids": torch.zeros(shape, dtype=torch.int32),
        "loss_mask": torch.zeros(shape, dtype=torch.int32),
        "logprobs": torch.zeros(shape, dtype=torch.float32),
        "versions": torch.full(shape, -1, dtype=torch.int32),
        "attention_mask": torch.zeros(shape, dtype=torch.bool),
        "rewards": torch.tensor([reward for _, reward in rows], dtype=torch.float32),
    }
    for row, (chain, _) in enumerate(rows):
        end, start = len(chain.ids), len(chain.ids) - len(chain.mask)
        tensors["input_ids"][row, :end] = torch.tensor(chain.ids, dtype=torch.int32)
        tensors["attention_mask"][row, :end] = True
        for name in ("loss_mask", "logprobs", "versions"):
            values = chain.mask if name == "loss_mask" else getattr(chain, name)
            tensors[name][row, start:end] = torch.tensor(values, dtype=tensors[name].dtype)
    return tensors


def main(argv: Sequence[str]) -> None:
    """Train."""
    # Imported here because rollout workers import this module only for the workflow, and AReaL's
    # trainer also imports its trackers and the GPU stack.
    from areal import PPOTrainer  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415

    workflow, *words = argv
    config, _ = load_expr_config(words, PPOConfig)
    train = Dataset.from_json(config.train_dataset.path)
    held_out = config.valid_dataset
    arguments = {"gconfig": config.gconfig, "tokenizer": config.tokenizer_path}
    with PPOTrainer(
        config,
        train_dataset=train,
        valid_dataset=None if held_out is None else Dataset.from_json(held_out.path),
    ) as trainer:
        trainer.train(
            workflow=workflow,
            workflow_kwargs=arguments,
            eval_workflow=None if held_out is None else workflow,
            eval_workflow_kwargs={**arguments, "gconfig": config.eval_gconfig},
        )


if __name__ == "__main__":
    main(sys.argv[1:])
