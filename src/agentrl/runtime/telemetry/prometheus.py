"""A Prometheus endpoint: `GET /metrics` returns the process's metrics of that moment."""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import uvicorn
from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from agentrl.addresses import family_of
from agentrl.errors import ConfigError
from agentrl.runtime.http.http_guard import HttpGuard
from agentrl.runtime.http.request_deadlines import server_config

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 1
"""Time that a running scrape gets to finish on shutdown."""


class _OnScrape(Collector):
    """Reads the metrics at every scrape, so counters are not duplicated."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


@contextmanager
def metrics_endpoint(
    host: str, port: int | None, read: Callable[[], Iterable[Metric]]
) -> Iterator[None]:
    """Serve `/metrics` from a thread while the context lasts.

    Args:
        host: address to listen on.
        port: port; None serves nothing.
        read: returns the current metrics; called from the serving thread.

    Raises:
        ConfigError: the port is in use, or the address is not of this machine.
    """
    if port is None:
        yield
        return
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
            HttpGuard(make_asgi_app(registry), host, carries_secrets=False),
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
