"""An OpenTelemetry collector on a real socket: decodes what is sent to `/v1/traces`, and keeps it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """What arrived, and how it is answered."""

    url: str = ""
    status: int = 200
    location: str = ""
    """Where a reply redirects to."""
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    wire: bytes = b""
    """All bodies, one after the other."""

    def named(self, start: str) -> list[Span]:
        """Return the spans whose names start so, by their time."""
        found = [span for span in self.spans if span.name.startswith(start)]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    """Take spans until the context ends."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces" and collector.status == 200:
                collector.wire += body
                for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resources.append(values(group.resource.attributes))
                    for scope in group.scope_spans:
                        collector.spans += scope.spans
            self.send_response(collector.status if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            if collector.location:
                self.send_header("Location", collector.location)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def values(attributes: Any) -> dict[str, Any]:
    """Return attributes as plain values."""
    return {one.key: _plain(one.value) for one in attributes}


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(one) for one in value.array_value.values]
    return getattr(value, kind or "string_value")
