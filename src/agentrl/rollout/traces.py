"""OpenTelemetry spans of rollouts, named by its semantic conventions for generative AI.

    invoke_agent rollout        one attempt at a slot: its own trace
      chat MODEL                a turn
      execute_tool NAME         a tool call; its context travels to the MCP server in `_meta`
      evaluate SCORER           the score

Input: the steps of rollouts. Output: spans, or nothing without `--otlp_endpoint`. Texts of messages,
arguments and results are omitted unless requested, because they may contain secrets.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    NoOpTracer,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    use_span,
)

from agentrl.config.sections import RootConfig
from agentrl.schema import DispatchedSamplingTask, Message, Record, Score, ToolCall, ToolResult
from agentrl.schema.image import shown_text

MAX_CONTENT_CHARS = 20_000
"""Longest attribute that holds texts; the rest is cut off."""


class Traces:
    """Starts the spans of a process's rollouts; without a tracer they cost nothing.

    Args:
        tracer: makes the spans.
        model: name of the trained model.
        show_content: put the texts of messages and tool calls into the spans.
    """

    def __init__(
        self, tracer: Tracer | None = None, model: str = "", *, show_content: bool = False
    ) -> None:
        self._tracer = tracer or NoOpTracer()
        self._is_enabled = tracer is not None
        self._model = model
        self._shows_content = show_content

    def rollout(self, record: Record) -> AbstractContextManager[Span]:
        """Open the span of an attempt, from its claim to its score."""
        return self._span(
            "invoke_agent rollout",
            SpanKind.INTERNAL,
            lambda: {"gen_ai.operation.name": "invoke_agent"} | _identity(record),
        )

    def chat(self, parent: Context) -> AbstractContextManager[Span]:
        """Open the span of a model call, its durable write included; see `describe_turn`.

        Args:
            parent: the rollout's context. Agents' calls arrive in their own tasks.
        """
        name = f"chat {self._model}"
        return self._span(name, SpanKind.CLIENT, self._chat_attributes, parent=parent)

    def _chat_attributes(self) -> dict[str, Any]:
        return {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "agentrl",
            "gen_ai.request.model": self._model,
        }

    def describe_turn(
        self,
        span: Span,
        turn: DispatchedSamplingTask,
        num_prompt_tokens: int,
        messages: Sequence[Message],
    ) -> None:
        """Add the details of a turn.

        Args:
            span: of the turn.
            turn: as it was stored.
            num_prompt_tokens: length of its prompt.
            messages: what its prompt adds to the turn that it continues.
        """
        if not span.is_recording():
            return
        sampling = turn.sampling_params
        versions = sorted({piece.version for piece in turn.version_spans})
        span.set_attributes(
            {
                "gen_ai.response.model": turn.model or self._model,
                "gen_ai.response.id": turn.id,
                "gen_ai.response.finish_reasons": [
                    "tool_calls" if turn.tool_calls else turn.finish_reason
                ],
                "gen_ai.usage.input_tokens": num_prompt_tokens,
                "gen_ai.usage.output_tokens": len(turn.output_ids),
                "gen_ai.usage.cache_read.input_tokens": turn.cached_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.max_tokens": sampling.max_new_tokens,
                "server.address": turn.server,
                "agentrl.turn.index": turn.index,
                "agentrl.policy.versions": versions,
            }
        )
        if sampling.seed is not None:
            span.set_attribute("gen_ai.request.seed", sampling.seed)
        if turn.branch_reason is not None:
            span.set_attribute("agentrl.turn.branch_reason", turn.branch_reason)
        if self._shows_content:
            reply = {"role": "assistant", "content": turn.output_text}
            span.set_attribute("gen_ai.input.messages", _messages(messages))
            span.set_attribute("gen_ai.output.messages", _messages([reply]))

    @contextmanager
    def tool(self, call: ToolCall) -> Iterator[Callable[[ToolResult], ToolResult]]:
        """Open the span of a tool call; the yielded function records its result and returns it."""

        def attributes() -> dict[str, Any]:
            return {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": call.name,
                "gen_ai.tool.type": "function",
                "gen_ai.tool.call.id": call.id,
            }

        with self._span(f"execute_tool {call.name}", SpanKind.INTERNAL, attributes) as span:
            if self._shows_content:
                span.set_attribute("gen_ai.tool.call.arguments", _json(call.arguments))

            def record_result(result: ToolResult) -> ToolResult:
                if result.is_error:
                    _mark_failed(span, "tool_error")
                if self._shows_content:
                    span.set_attribute("gen_ai.tool.call.result", _truncate(result.content))
                return result

            yield record_result

    def evaluation(self, record: Record) -> AbstractContextManager[Span]:
        """Open the span of a rollout's scoring; `describe_score` adds the result."""
        return self._span("evaluate", SpanKind.INTERNAL, partial(_identity, record))

    def describe_score(self, span: Span, score: Score) -> None:
        """Add a rollout's score, as the conventions' evaluation event."""
        if not span.is_recording():
            return
        span.update_name(f"evaluate {score.scorer}")
        values: dict[str, str | float] = {
            "gen_ai.evaluation.name": score.scorer,
            "gen_ai.evaluation.score.value": score.value,
        }
        if self._shows_content and score.detail:
            values["gen_ai.evaluation.explanation"] = _truncate(score.detail)
        span.set_attributes(values)
        span.add_event("gen_ai.evaluation.result", values)

    def _span(
        self,
        name: str,
        kind: SpanKind,
        attributes: Callable[[], Mapping[str, Any]],
        parent: Context | None = None,
    ) -> AbstractContextManager[Span]:
        if not self._is_enabled:
            return nullcontext(INVALID_SPAN)
        return self._recording_span(name, kind, attributes(), parent)

    @contextmanager
    def _recording_span(
        self, name: str, kind: SpanKind, attributes: Mapping[str, Any], parent: Context | None
    ) -> Iterator[Span]:
        span = self._tracer.start_span(name, context=parent, kind=kind, attributes=attributes)
        # Spans have only the type of an error, because its text may quote messages.
        with use_span(
            span, end_on_exit=True, record_exception=False, set_status_on_exception=False
        ):
            try:
                yield span
            except BaseException as error:
                _mark_failed(span, type(error).__name__)
                raise


@contextmanager
def open_traces(config: RootConfig) -> Iterator[Traces]:
    """Open the traces of a sampler process, as configured."""
    endpoint = config.run.otlp_endpoint
    if endpoint is None:
        yield Traces()
        return
    from agentrl.runtime.telemetry.span_export import span_export  # noqa: PLC0415 - an optional package

    address = endpoint.get_secret_value()
    with span_export(address, {"agentrl.run": config.run.run_name}) as tracer:
        yield Traces(tracer, config.model.model_name, show_content=config.run.otlp_content)


def _identity(record: Record) -> dict[str, Any]:
    return {
        "agentrl.record.id": record.id,
        "agentrl.task.id": record.task_id,
        "agentrl.split": record.split,
        "agentrl.attempt": record.attempt,
    }


def _mark_failed(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))


def _messages(messages: Sequence[Message]) -> str:
    return _json(
        [
            {
                "role": message.get("role"),
                "parts": [
                    {"type": "text", "content": _truncate(shown_text(message.get("content")))}
                ],
            }
            for message in messages
        ]
    )


def _json(value: object) -> str:
    return _truncate(json.dumps(value, ensure_ascii=False, default=str))


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_CONTENT_CHARS else f"{text[:MAX_CONTENT_CHARS]}..."
