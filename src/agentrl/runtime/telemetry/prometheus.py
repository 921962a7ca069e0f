"""A Prometheus endpoint: `GET /metrics` with the run's key returns the metrics of that moment."""

import hmac
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from agentrl.addresses import family_of
from agentrl.config.private_files import kept_key
from agentrl.config.sections import RunSection
from agentrl.errors import ConfigError
from agentrl.runtime.http.http_guard import HttpGuard
from agentrl.runtime.http.http_servers import server_config

logger = logging.getLogger(__name__)

KEY_FILE = "metrics-key"
"""File in the output directory with the key that scrapers send."""
_GRACE_SECONDS = 1
"""Time that a running scrape gets to finish on shutdown."""


class _OnScrape(Collector):
    """Reads the metrics at every scrape, so counters are not duplicated."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


class _KeyCheck:
    """ASGI middleware that answers requests without the key itself."""

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        challenge = [(b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": challenge})
        await send({"type": "http.response.body", "body": b""})


@contextmanager
def metrics_endpoint(section: RunSection, read: Callable[[], Iterable[Metric]]) -> Iterator[None]:
    """Serve `/metrics` from a thread while the context lasts, to those who send the run's key."""
    host, port, key = section.metrics_host, section.metrics_port, section.metrics_key
    if port is None:
        yield
        return
    secret = kept_key(section.output_path / KEY_FILE) if key is None else key.get_secret_value()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_OnScrape(read))
    try:
        listener = socket.create_server((host, port), family=family_of(host))
    except OSError as error:
        raise ConfigError(
            f"--metrics_port {port}: cannot listen on {host}: {error.strerror}; choose another"
        ) from None
    server = uvicorn.Server(
        server_config(
            HttpGuard(_KeyCheck(make_asgi_app(registry), secret), host),
            grace_seconds=_GRACE_SECONDS,
        )
    )
    # uvicorn does not install signal handlers outside the main thread.
    thread = threading.Thread(target=server.run, args=([listener],), name="metrics", daemon=True)
    thread.start()
    logger.info("metrics at http://%s:%d/metrics", host, listener.getsockname()[1])
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
