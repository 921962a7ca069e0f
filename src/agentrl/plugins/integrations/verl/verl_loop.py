"""The agent loop that verl runs: one rollout of the user's agent, token by token.

The agent calls an OpenAI-compatible endpoint in this process, which samples through verl's own
servers. Imports verl, so only generated modules and verl import it.
"""

import asyncio
import secrets
import time
from typing import Any, ClassVar

from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
)
from verl.experimental.agent_loop.tool_parser import ToolParser

from agentrl.errors import AgentWorkerError, APIError, InferenceError, UserCodeError
from agentrl.plugins.integrations.agent_worker.engine_session import EngineAgent, EngineReply
from agentrl.plugins.integrations.agent_worker.token_chains import TokenChain, TokenChains
from agentrl.schema import MCPTask, Message

_MAX_ATTEMPTS = 3


class WorkerAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl has no types
    """Runs the agent of a generated subclass, in worker processes.

    Every call continues the previous call's tokens as sampled. verl trains one sequence per
    rollout: if the agent held several conversations, the one with the most sampled tokens.
    """

    agent: ClassVar[EngineAgent]
    timeout_seconds: ClassVar[float] = 1200.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        format_name = self.rollout_config.multi_turn.format
        self._parser = ToolParser.get_tool_parser(format_name, self.tokenizer)
        self._length = self.rollout_config.response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run one rollout.

        An agent that fails after it called the model scores 0; its calls are trained on as sampled.
        """
        messages = [dict(message) for message in kwargs["raw_prompt"]]
        started = time.monotonic()
        reason = ""
        for _ in range(_MAX_ATTEMPTS):
            chains = TokenChains()
            score = None
            try:
                async with asyncio.timeout(self.timeout_seconds):
                    await self._run_agent(messages, chains, sampling_params)
            except (UserCodeError, TimeoutError) as error:
                score, reason = 0.0, f"{type(error).__name__}: {error}"
            except AgentWorkerError as error:
                reason = str(error)
                continue
            chain = chains.longest()
            if chain is not None:
                return self._output(chain, score, time.monotonic() - started)
            reason = reason or "the agent finished without calling the model"
        raise InferenceError(f"the rollout failed {_MAX_ATTEMPTS} times: {reason}")

    async def _run_agent(
        self, messages: list[Message], chains: TokenChains, sampling_params: dict[str, Any]
    ) -> None:
        async def answer(
            request_messages: list[Message], tools: list[dict[str, Any]]
        ) -> EngineReply:
            return await self._reply(chains, request_messages, tools, sampling_params)

        task = MCPTask(
            id=secrets.token_hex(8),
            query=_text(messages, "user"),
            system_prompt=_text(messages, "system"),
        )
        await self.agent.run(task, answer)

    async def _reply(
        self,
        chains: TokenChains,
        messages: list[Message],
        tools: list[dict[str, Any]],
        sampling_params: dict[str, Any],
    ) -> EngineReply:
        chain = chains.take(messages)
        try:
            ids, mask, logprobs = await self._prompt(chain, messages, tools)
            if len(mask) >= self._length:
                raise APIError(
                    f"response_length {self._length} is used up", code="context_length_exceeded"
                )
            output = await self.server_manager.generate(
                request_id=secrets.token_hex(8), prompt_ids=ids, sampling_params=sampling_params
            )
            output_logprobs = list(output.log_probs) if output.log_probs else None
            # The chain changes only after success, so a retried call starts from the same tokens.
            merged, chain.mask, chain.logprobs = await self.ct_merge_assistant_token(
                ids,
                output.token_ids,
                mask,
                (logprobs or []) if output_logprobs else logprobs,
                assistant_logprobs=output_logprobs,
            )
            chain.ids = list(merged.token_ids)
            content, calls = await self._parser.extract_tool_calls(list(output.token_ids))
            tool_calls = tuple((call.name, call.arguments) for call in calls)
            reply = EngineReply(content, tool_calls, len(ids), len(output.token_ids))
            chains.answered(chain, messages, reply.message())
            return reply
        finally:
            chains.give_back(chain)

    async def _prompt(
        self, chain: TokenChain, messages: list[Message], tools: list[dict[str, Any]]
    ) -> tuple[list[int], list[int], list[float] | None]:
        """Return a prompt's ids, and mask and logprobs of those after the chain's first prompt.

        verl's own template code appends the new part of the conversation to the chain's tokens.
        """
        if not chain.ids:
            ids = await self.ct_build_initial_tokens(messages, tools=tools or None)
            return list(ids), [], None
        # Copies, because verl may extend the lists in place.
        merged, mask, logprobs = await self.ct_merge_context_msg(
            chain.messages,
            [*chain.messages, *messages[len(chain.messages) :]],
            list(chain.ids),
            list(chain.mask),
            None if chain.logprobs is None else list(chain.logprobs),
            tools=tools or None,
        )
        return list(merged.token_ids), mask, logprobs

    def _output(self, chain: TokenChain, score: float | None, seconds: float) -> AgentLoopOutput:
        num_prompt = len(chain.ids) - len(chain.mask)
        logprobs = None if chain.logprobs is None else chain.logprobs[: self._length]
        return AgentLoopOutput(
            prompt_ids=chain.ids[:num_prompt],
            response_ids=chain.ids[num_prompt:][: self._length],
            response_mask=chain.mask[: self._length],
            response_logprobs=logprobs,
            reward_score=score,
            num_turns=len(chain.messages),
            metrics=AgentLoopMetrics(generate_sequences=seconds),
            extra_fields={"turn_scores": [], "tool_rewards": []},
        )


def _text(messages: list[Message], role: str) -> str:
    content = next((m["content"] for m in messages if m["role"] == role), "")
    return content if isinstance(content, str) else ""
