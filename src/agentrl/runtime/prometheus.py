"""A Prometheus endpoint: `GET /metrics` returns the process's metrics of that moment."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from agentrl.errors import ConfigError

logger = logging.getLogger(__name__)


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
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"--metrics_port {port}: cannot listen on {host}: {error.strerror}; choose another"
        ) from None
    logger.info("metrics at http://%s:%d/metrics", host, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
