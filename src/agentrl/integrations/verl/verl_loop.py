"""The agent loop that verl runs: one rollout of the user's agent, token by token.

The agent talks to an OpenAI-compatible endpoint in this process, which samples through verl's own
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

from agentrl.errors import InferenceError
from agentrl.integrations.agent_worker.answering import AnsweringSession, ConversationTooLong, Reply
from agentrl.integrations.agent_worker.chain import Chain, Chains
from agentrl.integrations.agent_worker.engine_worker import MODEL, shared_hosts, shared_server
from agentrl.integrations.agent_worker.worker_pool import AgentFailed, HostFailed, HostSettings
from agentrl.integrations.aworld.building import Endpoint
from agentrl.schema import MCPTask, Message

_ATTEMPTS = 3


class HostedAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl has no types
    """Plays the agent that a generated subclass describes.

    Every call continues the tokens of the call before, as sampled. verl trains one sequence a
    rollout: where the agent held several conversations, that is the one with the most sampled
    tokens.
    """

    hosts: ClassVar[HostSettings]
    timeout_seconds: ClassVar[float] = 1200.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        format_name = self.rollout_config.multi_turn.format
        self._parser = ToolParser.get_tool_parser(format_name, self.tokenizer)
        self._length = self.rollout_config.response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Play one rollout.

        An agent that fails after it spoke is worth 0; what it said is trained on as it was sampled.

        Raises:
            InferenceError: the rollout could not be played.
        """
        messages = [dict(message) for message in kwargs["raw_prompt"]]
        started = time.monotonic()
        reason = ""
        for _ in range(_ATTEMPTS):
            chains = Chains()
            score = None
            try:
                async with asyncio.timeout(self.timeout_seconds):
                    await self._play(messages, chains, sampling_params)
            except (AgentFailed, TimeoutError) as error:
                score, reason = 0.0, f"{type(error).__name__}: {error}"
            except HostFailed as error:
                reason = str(error)
                continue
            chain = chains.longest()
            if chain is not None:
                return self._output(chain, score, time.monotonic() - started)
            reason = reason or "the agent ended without a call to the model"
        raise InferenceError(f"the rollout could not be played: {reason}")

    async def _play(
        self, messages: list[Message], chains: Chains, sampling_params: dict[str, Any]
    ) -> None:
        async def answer(asked: list[Message], tools: list[dict[str, Any]]) -> Reply:
            return await self._reply(chains, asked, tools, sampling_params)

        server = await shared_server()
        session = AnsweringSession(MODEL, answer)
        task = MCPTask(
            id=secrets.token_hex(8),
            query=_text(messages, "user"),
            system_prompt=_text(messages, "system"),
        )
        async with server.serve(session):
            endpoint = Endpoint(server.base_url(session), MODEL, session.key)
            await shared_hosts(self.hosts).play(task, endpoint)

    async def _reply(
        self,
        chains: Chains,
        messages: list[Message],
        tools: list[dict[str, Any]],
        sampling_params: dict[str, Any],
    ) -> Reply:
        chain = chains.take(messages)
        try:
            if not chain.ids:
                chain.ids = list(await self.ct_build_initial_tokens(messages, tools=tools or None))
            else:
                merged, chain.mask, chain.logprobs = await self.ct_merge_context_msg(
                    chain.messages,
                    [*chain.messages, *messages[len(chain.messages) :]],
                    chain.ids,
                    chain.mask,
                    chain.logprobs,
                    tools=tools or None,
                )
                chain.ids = list(merged.token_ids)
            if len(chain.mask) >= self._length:
                raise ConversationTooLong(f"response_length {self._length} is used up")
            num_prompt = len(chain.ids)
            output = await self.server_manager.generate(
                request_id=secrets.token_hex(8),
                prompt_ids=chain.ids,
                sampling_params=sampling_params,
            )
            given = list(output.log_probs) if output.log_probs else None
            merged, chain.mask, chain.logprobs = await self.ct_merge_assistant_token(
                chain.ids,
                output.token_ids,
                chain.mask,
                (chain.logprobs or []) if given else chain.logprobs,
                assistant_logprobs=given,
            )
            chain.ids = list(merged.token_ids)
            chain.num_replies += 1
            content, calls = await self._parser.extract_tool_calls(list(output.token_ids))
            named = tuple((call.name, call.arguments) for call in calls)
            reply = Reply(content, named, num_prompt, len(output.token_ids))
            chain.messages = [*messages, reply.message()]
            return reply
        finally:
            chain.busy = False

    def _output(self, chain: Chain, score: float | None, seconds: float) -> AgentLoopOutput:
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
    found = next((m["content"] for m in messages if m["role"] == role), "")
    return found if isinstance(found, str) else ""
