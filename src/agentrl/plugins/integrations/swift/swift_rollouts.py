"""The code that runs inside ms-swift: rollouts of the user's agent, and its reward function.

The agent calls an OpenAI-compatible endpoint in the process of `swift rollout`, which samples through
its engine. Imports ms-swift, so only generated modules import it.
"""

import asyncio
import itertools
import json
import logging
import secrets
from typing import Any, ClassVar

from swift.infer_engine.protocol import RolloutInferRequest, RolloutOutput
from swift.rewards import AsyncORM
from swift.rollout import RolloutScheduler

from agentrl.errors import AgentWorkerError, UserCodeError
from agentrl.plugins.integrations.agent_worker.engine_session import EngineAgent, EngineReply
from agentrl.plugins.integrations.agent_worker.token_chains import TokenChain, TokenChains
from agentrl.plugins.integrations.agent_worker.worker_pool import AgentWorkerPool
from agentrl.plugins.integrations.question_rows import reward_inputs
from agentrl.schema import MCPTask, Message

log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3


class AgentReward(AsyncORM):  # type: ignore[misc]  # ms-swift has no types
    """Calls the user's reward function for each completion."""

    workers: ClassVar[AgentWorkerPool]

    async def __call__(
        self,
        completions: list[str],
        agentrl_row: list[str],
        rollout_infos: list[dict[str, Any]],
        **columns: Any,
    ) -> list[float]:
        """Return the rewards: of the agent's answers, or of completions that no agent made."""
        answers = [
            infos.get("answer", completion)
            for infos, completion in zip(rollout_infos, completions, strict=True)
        ]
        return await asyncio.gather(
            *(self._reward(json.loads(row), a) for row, a in zip(agentrl_row, answers, strict=True))
        )

    async def _reward(self, question: dict[str, Any], answer: str) -> float:
        if not answer.strip():
            return 0.0
        return await self.workers.reward({**reward_inputs(question), "solution_str": answer})


class AgentScheduler(RolloutScheduler):  # type: ignore[misc]  # ms-swift has no types
    """Runs the agent of a generated module, in worker processes."""

    agent: ClassVar[EngineAgent]
    timeout_seconds: ClassVar[float] = 1200.0

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
        """Run one rollout; return its conversation with the most sampled tokens.

        Args:
            infer_request: a row of the engine's data file, in `data_dict`.
            request_config: ms-swift's sampling parameters.
            **kwargs: further arguments of the engine's `infer_async`.

        Raises:
            AgentWorkerError: every attempt failed; ms-swift needs all rollouts of a group.
        """
        question = json.loads(infer_request.data_dict["agentrl_row"])
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            rollout = _Rollout(self.infer_engine, request_config, kwargs)
            try:
                answer = await self._run_agent(question, rollout)
            except AgentWorkerError as error:
                if attempt == _MAX_ATTEMPTS:
                    raise
                log.warning("a rollout failed: %s", error)
                continue
            chain = rollout.chains.longest()
            if chain is not None:
                return rollout.output(chain, answer)
        raise AgentWorkerError("the agent never called the model")

    async def _run_agent(self, question: dict[str, Any], rollout: "_Rollout") -> str:
        """Return the agent's answer; empty if the agent itself failed, which scores 0."""
        task = MCPTask(
            id=secrets.token_hex(8),
            query=str(question.get("query", question.get("question"))),
            system_prompt=str(question.get("system_prompt") or ""),
            dataset_id=str(question.get("id") or ""),
        )
        try:
            async with asyncio.timeout(self.timeout_seconds):
                return await self.agent.run(task, rollout.answer) or ""
        except (UserCodeError, TimeoutError) as error:
            log.info("the agent failed: %s", error)
            return ""


class _Rollout:
    """Answers the calls of one rollout with ms-swift's engine, which renders and parses."""

    def __init__(self, engine: Any, request_config: Any, arguments: dict[str, Any]) -> None:
        self.chains = TokenChains()
        self._engine = engine
        self._request_config = request_config
        self._arguments = arguments
        self._responses = dict[int, Any]()

    async def answer(self, messages: list[Message], tools: list[dict[str, Any]]) -> EngineReply:
        """Return the model's reply to a conversation."""
        chain = self.chains.take(messages)
        try:
            # Earlier replies are token ids, so that the engine continues what was sampled.
            known = [*chain.as_sampled, *messages[len(chain.messages) :]]
            request = RolloutInferRequest(messages=[{**m} for m in known], tools=tools or None)
            response = await self._engine.infer_async(
                request, self._request_config, **self._arguments
            )
            choice = response.choices[0]
            ids = list(choice.token_ids)
            logprobs = [item["logprob"] for item in (choice.logprobs or {}).get("content", ())]
            chain.extend(ids, 1, logprobs, [])
            calls = tuple(
                (call.function.name, call.function.arguments)
                for call in choice.message.tool_calls or ()
            )
            usage = response.usage
            reply = EngineReply(
                choice.message.content, calls, usage.prompt_tokens, usage.completion_tokens
            )
            chain.as_sampled = [*known, {"role": "assistant", "content": ids}]
            self.chains.answered(chain, messages, reply.message())
            self._responses[id(chain)] = response
            return reply
        finally:
            self.chains.give_back(chain)

    def output(self, chain: TokenChain, answer: str) -> Any:
        """Return a conversation of the rollout as ms-swift trains it: its tokens as sampled."""
        turns = [m["content"] for m in chain.as_sampled if _is_sampled(m)]
        logprobs = iter(chain.logprobs or ())
        # ms-swift reads the last message as text, and replaces all replies with the token ids.
        last = {"role": "assistant", "content": chain.messages[-1]["content"]}
        return RolloutOutput(
            response=self._responses[id(chain)],
            messages=[*chain.as_sampled[:-1], last],
            response_token_ids=turns,
            response_loss_mask=[[1] * len(ids) for ids in turns],
            rollout_logprobs=[[*itertools.islice(logprobs, len(ids))] for ids in turns]
            if len(chain.logprobs or ()) == chain.num_sampled
            else [],
            rollout_infos={"num_turns": len(turns), "answer": answer},
        )


def _is_sampled(message: Message) -> bool:
    content = message["content"]
    return message["role"] == "assistant" and isinstance(content, list)
