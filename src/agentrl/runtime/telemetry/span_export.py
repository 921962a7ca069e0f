"""Spans to an OpenTelemetry collector, over HTTP with protobuf (OTLP).

Input: the collector's address. Output: a tracer. A thread sends the spans in batches from a bounded
queue. Spans are lost while the collector is unreachable; they are counted and reported, and never
delay the run. Headers, compression, certificates and sampling come from OpenTelemetry's own
variables (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_TRACES_SAMPLER`, ...).
"""

import io
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

from agentrl.config.secrets import redact

log = logging.getLogger(__name__)

QUEUE_SPANS = 4096
"""Maximum number of spans that wait for the collector; the oldest are dropped first."""
BATCH_SPANS = 256
_PERIOD_SECONDS = 2.0
_REQUEST_SECONDS = 5.0
"""Timeout of one batch, including retries."""
_REPLY_BYTES = 1 << 16
"""Limit on the bytes read from a collector's reply."""
_SHUTDOWN_SECONDS = 5.0
"""How long shutdown waits for the remaining spans to be sent."""
_EXPORTER_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
)


@contextmanager
def span_export(endpoint: str, attributes: Mapping[str, str]) -> Iterator[Tracer]:
    """Send the spans of the yielded tracer to a collector until the context ends.

    Args:
        endpoint: base address of the collector, or its address for traces.
        attributes: attributes of this process in all spans.
    """
    exporter = _CountingExporter(endpoint)
    processor = _CountingProcessor(
        exporter,
        max_queue_size=QUEUE_SPANS,
        schedule_delay_millis=_PERIOD_SECONDS * 1000,
        max_export_batch_size=BATCH_SPANS,
    )
    service = {SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "agentrl")}
    provider = TracerProvider(
        resource=Resource.create({**service, **attributes}), shutdown_on_exit=False
    )
    provider.add_span_processor(processor)
    # These loggers report every lost batch and every dropped span; both are counted here.
    for name in _EXPORTER_LOGGERS:
        logging.getLogger(name).propagate = False
    try:
        yield provider.get_tracer("agentrl")
    finally:
        # The provider's shutdown waits half a minute for an unreachable collector.
        flushing = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
        flushing.start()
        flushing.join(_SHUTDOWN_SECONDS)
        exporter.shutdown()
        num_dropped = processor.num_ended - exporter.num_delivered
        if num_dropped:
            log.warning(
                "%d of %d spans did not reach %s (%s)",
                num_dropped,
                processor.num_ended,
                redact(endpoint),
                exporter.reason or "it did not respond in time",
            )


class _CountingProcessor(BatchSpanProcessor):
    """Counts the spans that were queued."""

    num_ended = 0

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self.num_ended += 1
        super().on_end(span)


class _CountingExporter(SpanExporter):
    """Counts the delivered spans, and logs once that some are not."""

    def __init__(self, endpoint: str) -> None:
        self.num_delivered = 0
        self.reason = ""
        self._endpoint = redact(endpoint)
        self._is_shut_down = False
        base = endpoint.rstrip("/")
        path = base if base.endswith("/v1/traces") else f"{base}/v1/traces"
        self._inner = OTLPSpanExporter(
            endpoint=path, timeout=_REQUEST_SECONDS, session=_BoundedSession()
        )

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._is_shut_down:
            return SpanExportResult.FAILURE
        with _captured_log() as messages:
            result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.num_delivered += len(spans)
            return result
        if not self.reason and not self._is_shut_down:
            self.reason = messages[0] if messages else "no reason given"
            log.warning(
                "the collector at %s does not accept spans (logged once; sampling continues): %s",
                self._endpoint,
                self.reason,
            )
        return result

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._inner.shutdown()  # type: ignore[no-untyped-call]


class _BoundedSession(requests.Session):
    """Reads only the status of a reply, and follows none to another address."""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        bounds = {"stream": True, "allow_redirects": False}
        with super().send(request, **{**options, **bounds}) as response:
            response.raw = io.BytesIO(response.raw.read(_REPLY_BYTES))
        if response.is_redirect:
            raise requests.TooManyRedirects("it redirects to another address")
        return response


class _ListHandler(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(redact(" ".join(record.getMessage().split()))[:300])


@contextmanager
def _captured_log() -> Iterator[list[str]]:
    """Collect the exporter's log messages, because its results contain no reason."""
    messages: list[str] = []
    handler = _ListHandler(messages)
    logger = logging.getLogger(_EXPORTER_LOGGERS[0])
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
