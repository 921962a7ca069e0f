"""One rollout's calls to its model, independent of the protocol.

Dialects convert a client's request to a `ChatRequest` or `TextRequest`, and write the `Completion`
that answers it in the client's format. A `ModelSession` answers the requests, whatever
their protocol.
"""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from agentrl.errors import APIError
from agentrl.schema import Message

FinishReason = Literal["stop", "length", "tool_calls"]
DeltaKind = Literal["reasoning_content", "content"]
DELTA_KINDS: tuple[DeltaKind, ...] = ("reasoning_content", "content")
"""The parts of a message that consist of text, in the order in which they are sampled."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class SamplingRequest:
    """How the client wants the tokens of a call to be drawn; None or absent if unspecified."""

    params: Mapping[str, float | int] = field(default_factory=dict)
    """Fields of `SamplingParams`: temperature, bounds and penalties."""
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CallRequest:
    """Fields that all kinds of requests share."""

    model: str
    sampling: SamplingRequest
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    """A stream ends with the number of tokens."""
    token_ids: bool = False
    """The answer holds the ids of the prompt and of the reply."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, kw_only=True)
class ChatRequest(CallRequest):
    """A conversation that the model is to continue."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    may_call: bool
    """Tool calls are returned as such; otherwise they are text like any other."""
    must_call: bool
    """The reply must be a tool call."""
    called_tool: str | None
    """The tool that it must call; None if the model may choose."""
    json_schema: Mapping[str, Any] | None
    """The schema that a reply without calls must follow; None allows any text."""
    raw: Mapping[str, Any]
    """The request in the form of `/v1/chat/completions`."""


@dataclass(frozen=True, kw_only=True)
class TextRequest(CallRequest):
    """A text that the model is to continue."""

    prompt: str | tuple[int, ...]
    """The text, or its token ids."""


@dataclass(frozen=True)
class Delta:
    """Text that continues the earlier text of its kind."""

    kind: DeltaKind
    text: str


OnDelta = Callable[[Delta], None]
"""Stream callback: receives a reply's text while it is sampled."""


@dataclass(frozen=True)
class Completion:
    """The answer to a request."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    message: Message
    """`content` and, if there are any, `tool_calls` (arguments as objects) and `reasoning_content`."""
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    stop_text: str | None = None
    """Which of the request's stop texts ended the reply, if one did."""
    token_logprobs: tuple[tuple[str, float], ...] = ()
    """Every sampled token as text, with its logprob."""
    prompt_ids: tuple[int, ...] = ()
    """Set if requested, as are `output_ids`."""
    output_ids: tuple[int, ...] = ()


class ModelSession(ABC):
    """Answers the model calls of one rollout.

    Attributes:
        id: part of the path of the rollout's address.
        key: its API key.
        model: name of the trained model.
    """

    def __init__(self, model: str) -> None:
        self.id = secrets.token_urlsafe(16)
        self.key = f"sk-{secrets.token_urlsafe(24)}"
        self.model = model
        self._responses: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    @property
    def models(self) -> tuple[str, ...]:
        """Model names that a request may use."""
        return (self.model,)

    def in_seat(self, name: str, stint: str) -> "ModelSession":
        """Return the session that answers the calls of one agent, if the rollout has several.

        Most sessions do not tell agents apart.
        """
        return self

    @abstractmethod
    async def chat(self, request: ChatRequest, on_delta: OnDelta | None = None) -> Completion:
        """Continue a conversation."""

    async def complete(self, request: TextRequest, on_delta: OnDelta | None = None) -> Completion:
        """Continue a text."""
        raise APIError(
            "text completion is not supported here; use /v1/chat/completions", status=404
        )

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return how many tokens the prompt of a conversation has; nothing is sampled."""
        raise APIError("token counting is not supported here", status=404)

    def refused(self, error: APIError) -> None:  # noqa: B027  most sessions do not record it
        """Record a call that is answered with an error."""

    def keep_messages(self, response_id: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Keep a conversation under the id of its last response."""
        self._responses[response_id] = messages

    def messages_until(self, response_id: object) -> Sequence[Mapping[str, Any]]:
        """Return the conversation up to and including a response; nothing for None."""
        if response_id is None:
            return ()
        if not isinstance(response_id, str) or response_id not in self._responses:
            raise APIError(
                f"previous_response_id: there is no response {response_id!r} in this rollout",
                status=404,
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return self._responses[response_id]

    def start(self, call: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run a call as a task that ends no later than the session."""
        if self._is_closed:
            call.close()
            raise session_over()
        task = asyncio.create_task(call)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        """Refuse further calls, and cancel those that are running."""
        self._is_closed = True
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def session_over() -> APIError:
    """Return the error for a call that belongs to no current rollout."""
    return APIError(
        "this rollout has ended or never started; its address serves one attempt at one task",
        status=404,
        code="session_not_found",
    )
