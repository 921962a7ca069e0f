"""`Session`: what the endpoint knows of one rollout, whoever answers its calls."""

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from agentrl.inference.dialects.api_errors import Refusal
from agentrl.inference.dialects.completion import Completion
from agentrl.inference.dialects.deltas import Listen
from agentrl.inference.dialects.requests import ChatRequest, CompletionRequest

_T = TypeVar("_T")


class Session(ABC):
    """The door of one rollout to its model.

    Attributes:
        id: what stands in the path of the rollout's address.
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
        """Names that a request may ask for."""
        return (self.model,)

    @abstractmethod
    async def chat(self, request: ChatRequest, listen: Listen | None = None) -> Completion:
        """Go on with a conversation.

        Args:
            request: what is asked.
            listen: is told the reply's words as they come; it need not be told all of them.

        Raises:
            Refusal: the request cannot be answered.
        """

    async def complete(
        self, request: CompletionRequest, listen: Listen | None = None
    ) -> Completion:
        """Go on with a text.

        Raises:
            Refusal: the request cannot be answered.
        """
        raise Refusal("texts are not completed here; use /v1/chat/completions", status=404)

    def keep_messages(self, response_id: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Keep a conversation under the id of its last response."""
        self._responses[response_id] = messages

    def messages_until(self, response_id: object) -> Sequence[Mapping[str, Any]]:
        """Return the conversation up to and with a response; nothing for None.

        Raises:
            Refusal: there was no such response in this rollout.
        """
        if response_id is None:
            return ()
        if not isinstance(response_id, str) or response_id not in self._responses:
            raise Refusal(
                f"previous_response_id: there is no response {response_id!r} in this rollout",
                status=404,
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return self._responses[response_id]

    def start(self, call: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run a call so that it ends with the session.

        Raises:
            Refusal: the session is over.
        """
        if self._is_closed:
            call.close()
            raise session_over()
        task = asyncio.create_task(call)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        """Take no more calls and end those under way."""
        self._is_closed = True
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def session_over() -> Refusal:
    """Return the answer to a call that no rollout waits for."""
    return Refusal(
        "this rollout is over, or never began: its address serves one try of one task",
        status=404,
        code="session_not_found",
    )
