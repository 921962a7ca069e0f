"""`RecordingSession`: a rollout's calls matched to each other, sampled, stored, answered."""

import json
import secrets
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from agentrl.config.sections import AgentSection
from agentrl.errors import RenderError, ServerRefused
from agentrl.inference import OnPartial
from agentrl.inference.dialects.api_errors import Refusal
from agentrl.inference.dialects.completion import (
    Completion,
    FinishReason,
    as_delivered,
    cut,
    with_call_ids,
)
from agentrl.inference.dialects.deltas import Listen, Telling
from agentrl.inference.dialects.messages import text_of, with_addresses
from agentrl.inference.dialects.requests import ChatRequest, CompletionRequest, unusable_schema
from agentrl.inference.dialects.session import Session
from agentrl.inference.dialects.upstream import Upstream
from agentrl.renderers import Reply
from agentrl.rollout.agent.call_history import History, Plan, Tools
from agentrl.rollout.agent.routed_calls import RoutedCalls
from agentrl.rollout.async_sampler import AsyncSampler, LimitReached
from agentrl.schema import DispatchedSamplingTask, Message, Outcome, ToolResult
from agentrl.schema.image import image_addresses

_LIMIT_CODES: dict[Outcome, str] = {"length_limit": "context_length_exceeded"}
_LIMIT_TEXTS: dict[Outcome, str] = {
    "length_limit": "the conversation is longer than the policy's context (--max_prompt_tokens, "
    "--context_length)",
    "turns_limit": "the rollout made as many model calls as it may (--max_turns)",
    "time_limit": "the rollout's time is up (--rollout_timeout_seconds)",
}


class RecordingSession(Session):
    """The door of one rollout to the policy: every call is a turn of its Record.

    Failures of the infrastructure are remembered until the same call succeeds: a rollout that ends
    with one left is nobody's answer.

    Attributes:
        limit: the limit that the last refused call met.
    """

    def __init__(
        self, sampler: AsyncSampler[Any], section: AgentSection, model: str, upstream: Upstream
    ) -> None:
        super().__init__(model)
        self.limit: Outcome | None = None
        self._call_mark = secrets.token_hex(6)
        self._sampler = sampler
        self._section = section
        self._routed = RoutedCalls(sampler, upstream)
        self._history = History(sampler.context.renderer)
        self._num_calls = 0
        self._failures: dict[str, Exception] = {}

    @property
    def models(self) -> tuple[str, ...]:
        """Names that a request may ask for."""
        return self.model, *self._routed.models

    @property
    def failure(self) -> Exception | None:
        """A failure of the infrastructure that no later call made good."""
        return next(iter(self._failures.values()), None)

    async def chat(self, request: ChatRequest, listen: Listen | None = None) -> Completion:
        """Go on with a conversation; the turn is durable on return.

        Raises:
            Refusal: the request cannot be answered.
        """
        call_key = json.dumps([request.model, request.raw], sort_keys=True, default=str)
        if request.model == self.model:
            return await self._guarded(call_key, self._chat(request, listen))
        self._require_route(request.model)
        return await self._guarded(call_key, self._forward(request))

    async def complete(
        self, request: CompletionRequest, listen: Listen | None = None
    ) -> Completion:
        """Go on with a text; the turn is durable on return.

        Raises:
            Refusal: the request cannot be answered.
        """
        if request.model != self.model:
            self._require_route(request.model)
            raise Refusal(f"{request.model!r} is routed for /v1/chat/completions only")
        return await self._guarded(f"{request.prompt}", self._complete(request, listen))

    def _require_route(self, model: str) -> None:
        if model not in self._routed.models:
            raise Refusal(
                f"the model {model!r} is not served here (served: {', '.join(self.models)}); ask "
                "for one of these, or give it a route with --agent_routes",
                status=404,
                code="model_not_found",
                param="model",
            )

    async def _forward(self, request: ChatRequest) -> Completion:
        return await self._routed.ask(request, await self._with_kept_images(request.messages))

    async def _guarded(self, call_key: str, call: Coroutine[Any, Any, Completion]) -> Completion:
        """Await a call; turn errors into refusals and keep the infrastructure's in mind."""
        try:
            completion = await call
        except LimitReached as limit:
            self.limit = limit.outcome
            raise Refusal(
                _LIMIT_TEXTS[limit.outcome],
                code=_LIMIT_CODES.get(limit.outcome, limit.outcome),
            ) from None
        except RenderError as error:
            raise Refusal(str(error), code="cannot_render") from None
        except Refusal:
            raise
        except Exception as error:
            # Whatever it is, it is not the policy's doing; the rollout must not be scored for it.
            self._failures[call_key] = error
            raise Refusal(f"{type(error).__name__}: {error}", status=503) from error
        self._failures.pop(call_key, None)
        return completion

    async def _chat(self, request: ChatRequest, listen: Listen | None) -> Completion:
        messages = await self._with_kept_images(request.messages)
        self._check_seen(messages)
        plan = self._history.plan(messages, request.tools)
        self._keep_results(plan)
        renderer = self._sampler.context.renderer
        if request.must_call:
            begun = renderer.call_beginning(request.called_tool)
            plan = replace(plan, prompt=plan.prompt.beginning(begun))
        prompt = plan.prompt
        telling = listen and Telling(
            lambda ids: renderer.parse(prompt.reply_ids(ids), tools=request.tools),
            listen,
            stop=request.sampling.stop,
            calls_may_lead=request.may_call,
        )
        turn, reply = await self._sample(plan, request, telling, request.tools)
        message = as_delivered(reply, may_call=request.may_call, stop=request.sampling.stop)
        if telling is not None:
            message = telling.whole(message)
        given = with_call_ids(message, self._call_mark)
        sent_ids = [call["id"] for call in given.get("tool_calls", ())]
        self._history.remember(plan, turn, reply.message, message, sent_ids)
        return self._completion(request, plan, turn, given)

    async def _complete(self, request: CompletionRequest, listen: Listen | None) -> Completion:
        renderer = self._sampler.context.renderer
        if isinstance(request.prompt, str):
            plan = self._history.plan_text(request.prompt)
        else:
            ids = np.asarray(request.prompt, dtype=np.int64)
            size = renderer.vocab_size
            if ids.min() < 0 or ids.max() >= size:
                raise Refusal(f"prompt: token ids have to be in [0, {size})", param="prompt")
            plan = self._history.plan_ids(ids.astype(np.int32), renderer.decode(ids))
        telling = listen and Telling(
            lambda ids: _all_said(renderer.parse(ids)), listen, stop=request.sampling.stop
        )
        turn, reply = await self._sample(plan, request, telling)
        message = {"role": "assistant", "content": cut(reply.text, request.sampling.stop)}
        if telling is not None:
            message = telling.whole(message)
        self._history.remember(plan, turn, reply.message, message)
        return self._completion(request, plan, turn, message)

    async def _sample(
        self,
        plan: Plan,
        request: ChatRequest | CompletionRequest,
        telling: Telling | None,
        tools: Tools = (),
    ) -> tuple[DispatchedSamplingTask, Reply]:
        may_call = isinstance(request, ChatRequest) and request.may_call
        drawn = self._drawing(request)
        try:
            with self._counted():
                return await self._sampler.sample(
                    plan.prompt,
                    messages=plan.added,
                    tools=tools,
                    judge=_format_errors_earn_nothing if may_call else None,
                    on_partial=None if telling is None else _to(telling),
                    **drawn,
                )
        except ServerRefused as error:
            if "grammar" in drawn and error.status == 400 and not error.is_transient:
                raise unusable_schema(f"no reply can be held to it: {error}") from None
            raise

    def _drawing(self, request: ChatRequest | CompletionRequest) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that a request decides."""
        context, asked = self._sampler.context, request.sampling
        drawn: dict[str, Any] = {"stop": asked.stop}
        if self._section.agent_sampling == "agent":
            drawn |= asked.params
            drawn["seed"] = asked.seed
        if asked.max_tokens is not None:
            most = context.sampling_params(self._sampler.record.split).max_new_tokens
            drawn["max_new_tokens"] = min(most, asked.max_tokens)
        # A call that has to be made takes the place of the answer that has to be JSON.
        if isinstance(request, ChatRequest) and not request.must_call:
            schema = request.json_schema
            if schema is not None:
                grammar = context.renderer.json_grammar(schema, may_call=request.may_call)
                drawn["grammar"] = grammar
        return drawn

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a call; one that fails is not counted, as the framework may make it again."""
        if self._num_calls >= self._sampler.context.rollout.max_turns:
            raise LimitReached("turns_limit")
        self._num_calls += 1
        try:
            yield
        except Exception:
            self._num_calls -= 1
            raise

    async def _with_kept_images(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return messages that name their images by where they are stored."""
        given = image_addresses(messages)
        if not given:
            return tuple(messages)
        kept = await self._sampler.context.images.keep(given)
        return with_addresses(messages, dict(zip(given, kept, strict=True)))

    def _check_seen(self, messages: Sequence[Message]) -> None:
        for message in messages:
            role = message["role"]
            if image_addresses([message]) and not self._sampler.context.renderer.shows_images_of(
                role
            ):
                raise Refusal(
                    f"the policy sees no images in messages of role {role!r}: its chat template "
                    "shows none; describe them in words, or train a model that sees",
                    code="unsupported_content",
                    param="messages",
                )

    def _keep_results(self, plan: Plan) -> None:
        """Store what the tool calls of the continued turn led to, unless it is stored already."""
        parent = plan.prompt.parent
        if not plan.results or parent is None or self._sampler.turns[parent].tool_results:
            return
        self._sampler.attach_results(
            [
                ToolResult(
                    call_id=message["tool_call_id"],
                    name=message.get("name", ""),
                    content=text_of(message),
                    images=image_addresses([message]),
                )
                for message in plan.results
            ],
            parent,
        )

    def _completion(
        self,
        request: ChatRequest | CompletionRequest,
        plan: Plan,
        turn: DispatchedSamplingTask,
        message: Message,
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
            token_logprobs=tuple((decode([id_]), float(logprob)) for id_, logprob in pairs),
        )


def _format_errors_earn_nothing(turn: DispatchedSamplingTask, reply: Reply) -> float | None:
    return 0.0 if any(call.format_error is not None for call in reply.tool_calls) else None


def _to(telling: Telling) -> OnPartial:
    return lambda so_far: telling.tell(so_far.output_ids)


def _all_said(reply: Reply) -> Reply:
    """Return a plain text's continuation, in which nothing is thinking or a call."""
    return replace(reply, content=reply.text, reasoning="", tool_calls=())
