"""`RecordingSession`: matches a rollout's calls to earlier ones, samples, stores and answers them."""

import json
import logging
import secrets
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from agentrl.config.sections import AgentSection
from agentrl.errors import APIError, PoisonousRequest, RenderError, ServerRefused
from agentrl.inference import OnPartial
from agentrl.inference.dialects.chat_completions import unusable_schema
from agentrl.inference.dialects.session import (
    ChatRequest,
    Completion,
    FinishReason,
    ModelSession,
    OnDelta,
    TextRequest,
)
from agentrl.inference.request_bodies import UNPAIRED_SURROGATE
from agentrl.renderers import Reply
from agentrl.rollout.agent.call_history import CallHistory, Plan, Tools
from agentrl.rollout.agent.reply_delivery import (
    DeltaStream,
    all_content,
    as_delivered,
    cut,
    stopped_by,
    with_call_ids,
)
from agentrl.rollout.async_sampler import AsyncSampler, LimitReached
from agentrl.rollout.evaluated_route import ROUTE_REFUSED, EvaluatedRoute
from agentrl.schema import DispatchedSamplingTask, Message, Outcome, Seat, ToolResult
from agentrl.schema.agent_result import MAX_SEAT_CHARS, MAX_SEATS
from agentrl.schema.image import image_addresses, image_part

log = logging.getLogger(__name__)

CANNOT_RENDER = "cannot_render"
_LIMIT_CODES: dict[Outcome, str] = {"length_limit": "context_length_exceeded"}
_LIMIT_TEXTS: dict[Outcome, str] = {
    "length_limit": "the policy's context is full: this model's maximum context length is "
    "{max_tokens} tokens (--max_prompt_tokens, --context_length)",
    "turns_limit": "the rollout reached its limit of model calls (--max_turns)",
    "time_limit": "the rollout timed out (--rollout_timeout_seconds)",
}


_CAUSED_BY_POLICY = frozenset(
    {*_LIMIT_TEXTS, *_LIMIT_CODES.values()}
    | {UNPAIRED_SURROGATE, CANNOT_RENDER, ROUTE_REFUSED, "unsupported_content"}
)
"""Codes of refusals caused by what the policy said, how much it said, or what its tools returned.
"""


@dataclass
class RolloutCalls:
    """What the calls of a rollout have in common, whichever seat makes them.

    An infrastructure failure is remembered until the same call succeeds; a refusal that the policy
    did not cause, until another call succeeds. A rollout that ends with either is not scored.

    Attributes:
        limit: the limit that the last refused call reached.
        refusal: why a call was refused because of the agent's own settings.
        seats: the seats that made calls, by name and the text by which their stints differ.
        failures: infrastructure failures, by the seat and the call that has not succeeded since.
        num_calls: calls that were answered or are being answered.
        num_sampling: calls that are being answered.
    """

    limit: Outcome | None = None
    refusal: APIError | None = None
    seats: dict[tuple[str, str], Seat] = field(default_factory=dict)
    failures: dict[tuple[Seat | None, str], Exception] = field(default_factory=dict)
    num_calls: int = 0
    num_sampling: int = 0

    @property
    def failure(self) -> Exception | None:
        """An infrastructure failure after which the same call has not succeeded."""
        return next(iter(self.failures.values()), None)

    @property
    def is_waiting_for_policy(self) -> bool:
        """Whether the agent is waiting for the policy, or a limit stopped the policy."""
        return self.num_sampling > 0 or self.limit is not None


class RecordingSession(ModelSession):
    """Answers calls of one rollout with the policy: every call is a turn of its Record.

    Attributes:
        calls: what the sessions of all seats of the rollout share.
    """

    def __init__(
        self,
        sampler: AsyncSampler[Any],
        section: AgentSection,
        model: str,
        logged_refusals: set[tuple[Any, ...]],
    ) -> None:
        """Start without any calls, as the session of callers that name no seat."""
        super().__init__(model)
        self.calls = RolloutCalls()
        self._logged_refusals = logged_refusals
        self._call_suffix = secrets.token_hex(6)
        self._sampler = sampler
        self._section = section
        self._seat: Seat | None = None
        # Only earlier calls of the same seat can be continued.
        self._history = CallHistory(sampler.context.renderer)
        self._seat_sessions: dict[tuple[str, str], RecordingSession] = {}

    def in_seat(self, name: str, stint: str) -> ModelSession:
        """Return the session of one stint of a seat, whose calls continue only its own."""
        key = name, stint
        if key not in self._seat_sessions:
            seats = self.calls.seats
            if not 0 < len(name) <= MAX_SEAT_CHARS or len(stint) > MAX_SEAT_CHARS:
                raise APIError(
                    f"the name of a seat has 1 to {MAX_SEAT_CHARS} characters, and that of its stint "
                    f"up to {MAX_SEAT_CHARS}; these have {len(name)} and {len(stint)}"
                )
            if len(seats) == MAX_SEATS:
                raise APIError(f"a rollout has at most {MAX_SEATS:,} seats and stints of seats")
            number = sum(seat.name == name for seat in seats.values())
            seats[key] = Seat(name=name, stint=number)
            session = copy(self)
            session._seat = seats[key]
            session._history = CallHistory(self._sampler.context.renderer)
            session._responses = {}
            self._seat_sessions[key] = session
        return self._seat_sessions[key]

    async def close(self) -> None:
        """Refuse further calls of all seats, and cancel those that are running."""
        for session in self._seat_sessions.values():
            session._is_closed = True
        await super().close()

    async def chat(self, request: ChatRequest, on_delta: OnDelta | None = None) -> Completion:
        """Continue a conversation; the turn is durable on return."""
        self._check_model(request.model)
        call_key = json.dumps([request.model, request.raw], sort_keys=True, default=str)
        route = self._sampler.context.evaluated_route
        call = self._chat(request, on_delta) if route is None else self._ask(route, request)
        return await self._guarded(call_key, call)

    async def complete(self, request: TextRequest, on_delta: OnDelta | None = None) -> Completion:
        """Continue a text; the turn is durable on return."""
        self._check_model(request.model)
        if self._sampler.context.evaluated_route is not None:
            raise APIError("--evaluated_route: available through /v1/chat/completions only")
        return await self._guarded(f"{request.prompt}", self._complete(request, on_delta))

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return how many tokens the prompt of a conversation has; nothing is sampled."""
        self._check_model(request.model)
        messages = await self._with_stored_images(request.messages)
        self._check_images_visible(messages)
        if not self._sampler.context.may_fit(messages, request.tools):
            raise self._limit_error("length_limit")
        try:
            return len(self._history.plan(messages, request.tools).prompt.ids)
        except RenderError as error:
            raise APIError(str(error), code=CANNOT_RENDER) from None

    def _check_model(self, model: str) -> None:
        if model != self.model:
            raise APIError(
                f"the model {model!r} is not served here (available: {self.model}); use this one, or "
                "call the other at its own address",
                status=404,
                code="model_not_found",
                param="model",
            )

    async def _guarded(self, call_key: str, call: Coroutine[Any, Any, Completion]) -> Completion:
        """Await a call; raise its errors as API errors, and remember infrastructure failures."""
        failed = (self._seat, call_key)
        try:
            completion = await call
        except LimitReached as limit:
            self.calls.limit = limit.outcome
            raise self._limit_error(limit.outcome) from None
        except RenderError as error:
            raise APIError(str(error), code=CANNOT_RENDER) from None
        except APIError:
            raise
        except PoisonousRequest as error:
            # This status keeps clients from retrying.
            self.calls.failures[failed] = error
            raise APIError(str(error), code="request_quarantined") from None
        except Exception as error:
            if isinstance(error, ServerRefused) and error.status == 400 and not error.is_transient:
                raise APIError(str(error), code="refused_by_server") from None
            # The policy did not cause it, so the rollout must not be scored for it.
            self.calls.failures[failed] = error
            raise APIError(f"{type(error).__name__}: {error}", status=503) from error
        self.calls.failures.pop(failed, None)
        self.calls.refusal = None
        return completion

    def _limit_error(self, outcome: Outcome) -> APIError:
        # With 400, a program may retry with a shorter prompt. At the other limits no call is answered:
        # programs that retry bad requests (400) do not retry forbidden ones (403).
        return APIError(
            _LIMIT_TEXTS[outcome].format(max_tokens=self._sampler.context.max_prompt_len),
            status=400 if outcome == "length_limit" else 403,
            code=_LIMIT_CODES.get(outcome, outcome),
        )

    def refused(self, error: APIError) -> None:
        """Remember a refusal unless the policy caused it, and log it once per process."""
        if error.status >= 500 or error.code in _CAUSED_BY_POLICY:
            return
        self.calls.refusal = error
        kind = (error.status, error.code, error.param)
        if kind not in self._logged_refusals:
            self._logged_refusals.add(kind)
            log.warning("the agent's model call was refused: %s (logged once)", error)

    async def _ask(self, route: EvaluatedRoute, request: ChatRequest) -> Completion:
        """Return the reply of the model that is evaluated; each call is a turn of its own."""
        messages = await self._with_stored_images(request.messages)
        started_at = self._sampler.now()
        reply = await route.ask(request.raw)
        await self._sampler.note_call(
            parent=None,
            added_messages=messages,
            **reply.fields(),
            model=route.name,
            seat=self._seat,
            server=route.server,
            started_at=started_at,
        )
        return Completion(
            id=request.id,
            created=request.created,
            model=self.model,
            message=reply.message,
            finish_reason=reply.finish_reason,
            num_prompt_tokens=0,
            num_output_tokens=0,
        )

    async def _chat(self, request: ChatRequest, on_delta: OnDelta | None) -> Completion:
        messages = await self._with_stored_images(request.messages)
        self._check_images_visible(messages)
        if not self._sampler.context.may_fit(messages, request.tools):
            raise LimitReached("length_limit")
        plan = self._history.plan(messages, request.tools)
        self._keep_results(plan)
        renderer = self._sampler.context.renderer
        if request.must_call:
            first_ids = renderer.call_beginning(request.called_tool)
            plan = replace(plan, prompt=plan.prompt.beginning(first_ids))
        prompt = plan.prompt
        deltas = on_delta and DeltaStream(
            lambda ids: renderer.parse(prompt.reply_ids(ids), tools=request.tools),
            on_delta,
            stop=request.sampling.stop,
            calls_may_lead=request.may_call,
        )
        turn, reply = await self._sample(plan, request, deltas, request.tools)
        message = as_delivered(reply, may_call=request.may_call, stop=request.sampling.stop)
        if deltas is not None:
            message = deltas.whole(message)
        delivered = with_call_ids(message, self._call_suffix)
        sent_ids = [call["id"] for call in delivered.get("tool_calls", ())]
        self._history.remember(plan, turn, reply.message, message, sent_ids)
        return self._completion(request, plan, turn, delivered, reply.text)

    async def _complete(self, request: TextRequest, on_delta: OnDelta | None) -> Completion:
        renderer = self._sampler.context.renderer
        prompt, max_tokens = request.prompt, self._sampler.context.max_prompt_len
        is_long = isinstance(prompt, tuple) and len(prompt) > max_tokens
        if is_long or not self._sampler.context.may_fit(prompt):
            raise LimitReached("length_limit")
        if isinstance(request.prompt, str):
            plan = self._history.plan_text(request.prompt)
        else:
            ids = np.asarray(request.prompt, dtype=np.int64)
            size = renderer.vocab_size
            if ids.min() < 0 or ids.max() >= size:
                raise APIError(f"prompt: token ids must be in [0, {size})", param="prompt")
            plan = self._history.plan_ids(ids.astype(np.int32), renderer.decode(ids))
        deltas = on_delta and DeltaStream(
            lambda ids: all_content(renderer.parse(ids)), on_delta, stop=request.sampling.stop
        )
        turn, reply = await self._sample(plan, request, deltas)
        message = {"role": "assistant", "content": cut(reply.text, request.sampling.stop)}
        if deltas is not None:
            message = deltas.whole(message)
        self._history.remember(plan, turn, reply.message, message)
        return self._completion(request, plan, turn, message, reply.text)

    async def _sample(
        self,
        plan: Plan,
        request: ChatRequest | TextRequest,
        deltas: DeltaStream | None,
        tools: Tools = (),
    ) -> tuple[DispatchedSamplingTask, Reply]:
        may_call = isinstance(request, ChatRequest) and request.may_call
        fields = self._sampling_fields(request)
        try:
            with self._count_call():
                recorded = await self._sampler.replayed(plan.prompt, tools=tools, seat=self._seat)
                if recorded is not None:
                    return recorded
                return await self._sampler.sample(
                    plan.prompt,
                    messages=plan.added,
                    tools=tools,
                    advantage_override=_format_error_advantage if may_call else None,
                    on_partial=None if deltas is None else _on_partial(deltas),
                    seat=self._seat,
                    **fields,
                )
        except ServerRefused as error:
            if "grammar" in fields and error.status == 400 and not error.is_transient:
                raise unusable_schema(f"replies cannot be constrained to it: {error}") from None
            raise

    def _sampling_fields(self, request: ChatRequest | TextRequest) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that a request decides."""
        context, requested = self._sampler.context, request.sampling
        fields: dict[str, Any] = {"stop": requested.stop}
        if self._section.agent_sampling == "agent":
            fields |= requested.params
            fields["seed"] = requested.seed
        if requested.max_tokens is not None:
            limit = context.sampling_params(self._sampler.record.split).max_new_tokens
            fields["max_new_tokens"] = min(limit, requested.max_tokens)
        # A required call has its own grammar: the schema constrains other replies only.
        if isinstance(request, ChatRequest) and not request.must_call:
            schema = request.json_schema
            if schema is not None:
                grammar = context.renderer.json_grammar(schema, may_call=request.may_call)
                fields["grammar"] = grammar
        return fields

    @contextmanager
    def _count_call(self) -> Iterator[None]:
        """Count a call; one that fails is not counted, as the framework may retry it."""
        if self.calls.num_calls >= self._sampler.context.rollout.max_turns:
            raise LimitReached("turns_limit")
        self.calls.num_calls += 1
        self.calls.num_sampling += 1
        try:
            yield
        except Exception:
            self.calls.num_calls -= 1
            raise
        finally:
            self.calls.num_sampling -= 1

    async def _with_stored_images(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Store the images of messages; return messages that name them by their stored addresses."""
        addresses = image_addresses(messages)
        if not addresses:
            return tuple(messages)
        stored = await self._sampler.context.images.keep(addresses)
        return _with_addresses(messages, dict(zip(addresses, stored, strict=True)))

    def _check_images_visible(self, messages: Sequence[Message]) -> None:
        for message in messages:
            role = message["role"]
            if image_addresses([message]) and not self._sampler.context.renderer.shows_images_of(
                role
            ):
                raise APIError(
                    f"the policy cannot see images in messages of role {role!r}: its chat "
                    "template does not render them; describe them in words, or train a model "
                    "that sees images",
                    code="unsupported_content",
                    param="messages",
                )

    def _keep_results(self, plan: Plan) -> None:
        """Store the tool results of the continued turn, unless they are stored already."""
        parent = plan.prompt.parent
        if not plan.results or parent is None or self._sampler.turns[parent].tool_results:
            return
        self._sampler.attach_results(
            [
                ToolResult(
                    call_id=message["tool_call_id"],
                    name=message.get("name", ""),
                    content=_text_of(message),
                    images=image_addresses([message]),
                )
                for message in plan.results
            ],
            parent,
        )

    def _completion(
        self,
        request: ChatRequest | TextRequest,
        plan: Plan,
        turn: DispatchedSamplingTask,
        message: Message,
        text: str,
    ) -> Completion:
        finish: FinishReason = "stop"
        if turn.finish_reason == "length":
            finish = "length"
        elif message.get("tool_calls"):
            finish = "tool_calls"
        decode = self._sampler.context.renderer.decode
        pairs = zip(turn.output_ids, turn.output_logprobs, strict=True) if request.logprobs else ()
        return Completion(
            id=request.id,
            created=request.created,
            model=self.model,
            message=message,
            finish_reason=finish,
            num_prompt_tokens=len(plan.prompt.ids),
            num_output_tokens=len(turn.output_ids),
            num_cached_tokens=turn.cached_tokens,
            stop_text=stopped_by(text, request.sampling.stop) if finish == "stop" else None,
            prompt_ids=tuple(plan.prompt.ids.tolist()) if request.token_ids else (),
            output_ids=tuple(turn.output_ids.tolist()) if request.token_ids else (),
            token_logprobs=tuple((decode([id_]), float(logprob)) for id_, logprob in pairs),
        )


def _text_of(message: Message) -> str:
    """Return the text of a message without its images."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def _with_addresses(
    messages: Sequence[Message], addresses: Mapping[str, str]
) -> tuple[Message, ...]:
    """Return messages with new addresses of their images (`addresses`: old -> new)."""

    def with_new_address(part: Mapping[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return dict(part)
        return image_part(addresses[part["image_url"]["url"]])

    return tuple(
        message
        if isinstance(message["content"], str)
        else {**message, "content": [with_new_address(part) for part in message["content"]]}
        for message in messages
    )


def _format_error_advantage(turn: DispatchedSamplingTask, reply: Reply) -> float | None:
    """Return the advantage 0 for a reply with a malformed call, None for any other."""
    return 0.0 if any(call.format_error is not None for call in reply.tool_calls) else None


def _on_partial(deltas: DeltaStream) -> OnPartial:
    return lambda result: deltas.update(result.output_ids)
