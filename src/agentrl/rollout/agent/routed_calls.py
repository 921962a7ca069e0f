"""Calls of a rollout for other models than the trained one."""

from collections.abc import Sequence
from typing import Any

from agentrl.inference.dialects.completion import Completion
from agentrl.inference.dialects.messages import meaning
from agentrl.inference.dialects.requests import ChatRequest
from agentrl.inference.dialects.upstream import Upstream
from agentrl.rollout.async_sampler import AsyncSampler
from agentrl.schema import Message, utc_now


class RoutedCalls:
    """Sends calls on, and stores them beside the policy's: without tokens, without loss."""

    def __init__(self, sampler: AsyncSampler[Any], upstream: Upstream) -> None:
        self._sampler = sampler
        self._upstream = upstream
        self._turns: dict[tuple[str, ...], int] = {}
        """What was said to and by a model -> index of the turn in which it said the last of it."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that have a route."""
        return self._upstream.models

    async def ask(self, request: ChatRequest, messages: Sequence[Message]) -> Completion:
        """Return what another model says; the turn is durable on return.

        Args:
            request: is sent on as the agent made it.
            messages: its messages, images under the addresses where they are stored.

        Raises:
            InferenceError: the endpoint gave no answer.
            Refusal: it refused the request as such.
        """
        started_at = utc_now()
        answer = await self._upstream.ask(request.model, request.raw)
        said = (request.model, *map(meaning, messages))
        known = next((n for n in range(len(said), 1, -1) if said[:n] in self._turns), 1)
        turn = await self._sampler.note_call(
            parent=self._turns.get(said[:known]),
            added_messages=tuple(messages[known - 1 :]),
            output_text=answer.message["content"],
            tool_calls=answer.tool_calls,
            finish_reason="length" if answer.finish_reason == "length" else "stop",
            model=request.model,
            server=answer.server,
            started_at=started_at,
        )
        self._turns[(*said, meaning(answer.message))] = turn.index
        return Completion(
            id=request.id,
            created=request.created,
            model=request.model,
            message=answer.message,
            finish_reason=answer.finish_reason,
            num_prompt_tokens=answer.num_prompt_tokens,
            num_output_tokens=answer.num_output_tokens,
        )
