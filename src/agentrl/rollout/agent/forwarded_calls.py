"""An agent's calls to models that are not trained: forwarded, and stored as turns without tokens."""

from collections.abc import Sequence
from typing import Any

from agentrl.inference.dialects.continuation import ContinuationIndex, conversation_key
from agentrl.inference.dialects.session import ChatRequest, Completion
from agentrl.rollout.async_sampler import AsyncSampler
from agentrl.rollout.forwarded_models import ForwardedModels
from agentrl.schema import Message, Seat


class ForwardedCalls:
    """One rollout's calls to other models: turns alongside the policy's, without loss."""

    def __init__(self, sampler: AsyncSampler[Any], models: ForwardedModels) -> None:
        self._sampler = sampler
        self._models = models
        self._turns = ContinuationIndex[int]()
        """Indices of turns; the scope of a conversation is the caller's seat and the model's name."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that are forwarded to."""
        return self._models.names

    async def ask(
        self, request: ChatRequest, messages: Sequence[Message], seat: Seat | None
    ) -> Completion:
        """Return another model's reply; the turn is durable on return."""
        started_at = self._sampler.now()
        reply = await self._models.ask(request.model, request.raw)
        conversation = conversation_key(messages, scope=f"{seat} {request.model}")
        num_known, turns = next(self._turns.matches(conversation), (0, ()))
        turn = await self._sampler.note_call(
            parent=turns[-1] if turns else None,
            added_messages=tuple(messages[num_known:]),
            output_text=reply.message["content"],
            tool_calls=reply.tool_calls,
            finish_reason="length" if reply.finish_reason == "length" else "stop",
            model=request.model,
            seat=seat,
            server=reply.server,
            started_at=started_at,
        )
        self._turns.add(conversation, reply.message, turn.index)
        return Completion(
            id=request.id,
            created=request.created,
            model=request.model,
            message=reply.message,
            finish_reason=reply.finish_reason,
            num_prompt_tokens=reply.num_prompt_tokens,
            num_output_tokens=reply.num_output_tokens,
        )
