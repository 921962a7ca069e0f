"""Calls of an agent framework, answered by whatever a training engine samples with."""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agentrl.errors import AgentRLError, InferenceError
from agentrl.inference.dialects.api_errors import Refusal
from agentrl.inference.dialects.completion import Completion
from agentrl.inference.dialects.deltas import Listen
from agentrl.inference.dialects.messages import arguments_of
from agentrl.inference.dialects.requests import ChatRequest
from agentrl.inference.dialects.session import Session
from agentrl.schema import Message


class ConversationTooLong(AgentRLError):
    """There is no room for a reply."""


@dataclass(frozen=True)
class Reply:
    """What the model said: text, and tool calls as (name, arguments in JSON)."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    def message(self) -> Message:
        """Return the reply as a message of the conversation; its calls get new ids."""
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


Answer = Callable[[list[Message], list[dict[str, Any]]], Awaitable[Reply]]
"""Messages (arguments of calls as objects) and tools to a reply."""


class AnsweringSession(Session):
    """The door of one rollout to a function.

    Args:
        model: the name that the agent is told; it may ask for any.
        answer: replies to conversations.
    """

    def __init__(self, model: str, answer: Answer) -> None:
        super().__init__(model)
        self._answer = answer

    async def chat(self, request: ChatRequest, listen: Listen | None = None) -> Completion:
        """Go on with a conversation; nothing is told before its end.

        Raises:
            Refusal: the request cannot be answered.
        """
        if request.json_schema is not None:
            raise Refusal(
                "response_format: this engine does not hold replies to a schema; ask for the form "
                "in words",
                code="unsupported_value",
                param="response_format",
            )
        try:
            reply = await self._answer([*request.messages], [*request.tools])
        except ConversationTooLong as error:
            raise Refusal(str(error), code="context_length_exceeded") from error
        except InferenceError as error:
            raise Refusal(str(error), status=503) from error
        except AgentRLError as error:
            raise Refusal(str(error)) from error
        return Completion(
            id=request.id,
            created=request.created,
            model=request.model,
            message=reply.message(),
            finish_reason="tool_calls" if reply.calls else "stop",
            num_prompt_tokens=reply.num_prompt_tokens,
            num_output_tokens=reply.num_output_tokens,
        )
