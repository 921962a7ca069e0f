"""The workflow that AReaL runs: a group of rollouts of the user's agent, as tensors.

The agent talks to an OpenAI-compatible endpoint in this process, which samples through AReaL's
inference engine. Imports AReaL and torch, so only generated modules import it.
"""

import asyncio
import json
import logging
import secrets
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from areal import workflow_context
from areal.api import ModelRequest, RolloutWorkflow
from areal.utils import stats_tracker

from agentrl.integrations.agent_worker.answering import AnsweringSession
from agentrl.integrations.agent_worker.chain import Chain
from agentrl.integrations.agent_worker.engine_worker import MODEL, shared_hosts, shared_server
from agentrl.integrations.agent_worker.recorded_rollout import RecordedRollout, Sampled
from agentrl.integrations.agent_worker.worker_pool import AgentFailed, HostFailed, HostSettings
from agentrl.integrations.aworld.building import Endpoint
from agentrl.integrations.dataset_rows import reward_inputs
from agentrl.models.resolve import resolve_model
from agentrl.renderers import Renderer
from agentrl.schema import MCPTask

_ATTEMPTS = 3
_SPREAD = 1e-6

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Play:
    chains: list[Chain]
    reward: float


class HostedWorkflow(RolloutWorkflow):  # type: ignore[misc]  # AReaL has no types
    """Plays the agent that a generated subclass describes.

    An episode is a whole group: AReaL's own grouping and normalisation of rewards count rows, and
    a rollout has as many rows as its agent held conversations. So the rewards are normalised here,
    over the rollouts of the group, and every row has its rollout's.
    """

    hosts: ClassVar[HostSettings]
    n_samples: ClassVar[int]
    timeout_seconds: ClassVar[float] = 1200.0

    def __init__(self, gconfig: Any, tokenizer: str) -> None:
        """Set up.

        Args:
            gconfig: AReaL's `GenerationHyperparameters`.
            tokenizer: directory or hub id of the model's tokenizer and chat template.
        """
        self.gconfig = gconfig
        self.tokenizer = tokenizer

    @cached_property
    def renderer(self) -> Renderer:
        """The model's chat template and tokenizer."""
        return Renderer.load(resolve_model(self.tokenizer))

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Play a question `n_samples` times; in an evaluation once, with the reward as it is.

        Args:
            engine: AReaL's inference engine.
            data: a row of the data that the engine wrote.

        Returns:
            For B conversations of at most L tokens: `input_ids` and `loss_mask` int32 [B, L],
            `logprobs` float32 [B, L], `versions` int32 [B, L] (-1 where nothing was sampled),
            `attention_mask` bool [B, L], `rewards` float32 [B]. None where fewer than two rollouts
            could be played and scored: AReaL then trains on nothing of this question.
        """
        question = json.loads(data["question"])
        is_eval = workflow_context.get().is_eval
        num_plays = 1 if is_eval else self.n_samples
        plays = await asyncio.gather(*(self._attempts(engine, question) for _ in range(num_plays)))
        kept = [play for play in plays if play is not None]
        if len(kept) < min(2, num_plays):
            return None
        for play in kept:
            stats_tracker.get(workflow_context.stat_scope()).scalar(reward=play.reward)
        rewards = torch.tensor([play.reward for play in kept], dtype=torch.float64)
        if not is_eval:
            rewards = (rewards - rewards.mean()) / (rewards.std(correction=0) + _SPREAD)
        return _tensors(
            [
                (chain, float(reward))
                for play, reward in zip(kept, rewards, strict=True)
                for chain in play.chains
            ]
        )

    async def _attempts(self, engine: Any, question: dict[str, Any]) -> _Play | None:
        for _ in range(_ATTEMPTS):
            try:
                play = await self._play(engine, question)
            except HostFailed as error:
                log.warning("a rollout could not be played: %s", error)
                continue
            if play is not None:
                return play
        return None

    async def _play(self, engine: Any, question: dict[str, Any]) -> _Play | None:
        """Play and score one rollout; None where the agent never asked the model."""
        max_tokens = self.gconfig.max_tokens
        rollout = RecordedRollout(self.renderer, lambda ids: self._ask(engine, ids), max_tokens)
        server = await shared_server()
        session = AnsweringSession(MODEL, rollout.answer)
        hosts = shared_hosts(self.hosts)
        task = MCPTask(
            id=secrets.token_hex(8),
            query=str(question.get("query", question.get("question"))),
            system_prompt=str(question.get("system_prompt") or ""),
            dataset_id=str(question.get("id") or ""),
        )
        answer: str | None = None
        async with server.serve(session):
            try:
                async with asyncio.timeout(self.timeout_seconds):
                    endpoint = Endpoint(server.base_url(session), MODEL, session.key)
                    answer = await hosts.play(task, endpoint)
            except (AgentFailed, TimeoutError) as error:
                # Its own failure is worth 0, but not that it never asked.
                log.info("the agent failed: %s", error)
        chains = rollout.chains.sampled()
        if not chains:
            return None
        if answer is None or not answer.strip():
            return _Play(chains, 0.0)
        try:
            arguments = {**reward_inputs(question), "solution_str": answer}
            return _Play(chains, await hosts.reward(arguments))
        except AgentFailed as error:
            # What the reward function raises is no 0.
            raise HostFailed(f"reward_func: {error}") from error

    async def _ask(self, engine: Any, ids: list[int]) -> Sampled:
        room = self.gconfig.max_tokens - len(ids)
        gconfig = self.gconfig.new(
            n_samples=1,
            max_new_tokens=min(self.gconfig.max_new_tokens, room),
            stop_token_ids=sorted(self.renderer.stop_token_ids),
        )
        request = ModelRequest(rid=secrets.token_hex(16), input_ids=ids, gconfig=gconfig)
        response = await engine.agenerate(request)
        return Sampled(response.output_tokens, response.output_logprobs, response.output_versions)


def _tensors(rows: list[tuple[Chain, float]]) -> dict[str, Any]:
    length = max(len(chain.ids) for chain, _ in rows)
    shape = (len(rows), length)
    found = {
        "input_ids": torch.zeros(shape, dtype=torch.int32),
        "loss_mask": torch.zeros(shape, dtype=torch.int32),
        "logprobs": torch.zeros(shape, dtype=torch.float32),
        "versions": torch.full(shape, -1, dtype=torch.int32),
        "attention_mask": torch.zeros(shape, dtype=torch.bool),
        "rewards": torch.tensor([reward for _, reward in rows], dtype=torch.float32),
    }
    for row, (chain, _) in enumerate(rows):
        end, start = len(chain.ids), len(chain.ids) - len(chain.mask)
        found["input_ids"][row, :end] = torch.tensor(chain.ids, dtype=torch.int32)
        found["attention_mask"][row, :end] = True
        for name in ("loss_mask", "logprobs", "versions"):
            values = chain.mask if name == "loss_mask" else getattr(chain, name)
            found[name][row, start:end] = torch.tensor(values, dtype=found[name].dtype)
    return found
