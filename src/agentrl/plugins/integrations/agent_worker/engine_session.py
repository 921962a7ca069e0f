"""Answers an agent's model calls with the sampling of a training engine."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from agentrl.errors import AgentRLError, AgentWorkerError, APIError, InferenceError
from agentrl.inference.dialects.api_server import APIServer
from agentrl.inference.dialects.messages import arguments_of
from agentrl.inference.dialects.session import ChatRequest, Completion, ModelSession, OnDelta
from agentrl.plugins.integrations.agent_worker.worker_pool import AgentWorkerPool
from agentrl.schema import MCPTask, Message

MODEL = "policy"
"""Name under which agents ask for the trained model."""


@dataclass(frozen=True)
class EngineReply:
    """The model's reply: text, and tool calls as (name, arguments in JSON)."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    def message(self) -> Message:
        """Return the reply as a message of the conversation, with new ids for its calls."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{secrets.token_hex(8)}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments_of(arguments)},
                }
                for name, arguments in self.calls
            ]
        return message


AnswerCall = Callable[[list[Message], list[dict[str, Any]]], Awaitable[EngineReply]]
"""Messages (arguments of calls as objects) and tools to a reply."""


class EngineSession(ModelSession):
    """Answers the model calls of one rollout with a function."""

    def __init__(self, model: str, answer: AnswerCall) -> None:
        super().__init__(model)
        self._answer = answer

    async def chat(self, request: ChatRequest, on_delta: OnDelta | None = None) -> Completion:
        """Continue a conversation; nothing is streamed before the reply is complete."""
        if request.json_schema is not None:
            raise APIError(
                "response_format: this engine does not support structured output; describe the "
                "format in the prompt",
                code="unsupported_value",
                param="response_format",
            )
        try:
            reply = await self._answer([*request.messages], [*request.tools])
        except APIError:
            raise
        except InferenceError as error:
            raise APIError(str(error), status=503) from error
        except AgentRLError as error:
            raise APIError(str(error)) from error
        return Completion(
            id=request.id,
            created=request.created,
            model=request.model,
            message=reply.message(),
            finish_reason="tool_calls" if reply.calls else "stop",
            num_prompt_tokens=reply.num_prompt_tokens,
            num_output_tokens=reply.num_output_tokens,
        )


class EngineAgent:
    """The agent inside a process of a training engine: its workers, and one shared server.

    Both start on first use. Engines create their own objects for every rollout without marking the
    last one, so a generated module keeps one `EngineAgent` for its whole lifetime.
    """

    def __init__(self, workers: AgentWorkerPool) -> None:
        self.workers = workers
        self._open = AsyncExitStack()
        self._server: asyncio.Future[APIServer] | None = None

    async def run(self, task: MCPTask, answer: AnswerCall) -> str | None:
        """Run the agent on a task; return its answer."""
        if self._server is None:
            opening = self._open.enter_async_context(APIServer.open("127.0.0.1"))
            self._server = asyncio.ensure_future(opening)
        # Shielded, so that a rollout that times out does not stop the server for the others.
        server = await asyncio.shield(self._server)
        async with server.serve(EngineSession(MODEL, answer)) as endpoint:
            result = await self.workers.run(task, endpoint)
        if result.error is not None:
            raise AgentWorkerError(f"the agent ended the attempt: {result.error}")
        if result.reward is not None or result.step_rewards or result.seats:
            raise AgentWorkerError(
                "the agent returns a reward, and this engine uses reward_func: return only the "
                "answer, or train with the engine `agentrl`"
            )
        return result.answer

    async def close(self) -> None:
        """Stop the server and the workers."""
        await self._open.aclose()
        self._server = None
        self.workers.close()
