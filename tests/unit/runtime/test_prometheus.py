import socket

import pytest
from prometheus_client.core import GaugeMetricFamily
from support.scrape import scrape

from agentrl.errors import ConfigError
from agentrl.runtime.ports import free_port
from agentrl.runtime.prometheus import metrics_endpoint


def test_every_scrape_asks_anew_and_the_port_is_free_afterwards() -> None:
    values = iter([1.0, 2.0, 3.0])
    port = free_port()
    with metrics_endpoint(
        "127.0.0.1", port, lambda: [GaugeMetricFamily("thing", "A thing.", value=next(values))]
    ):
        assert [scrape(port)[("thing", ())] for _ in range(2)] == [1.0, 2.0]
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"--metrics_port {port}: cannot listen"),
            metrics_endpoint("127.0.0.1", port, list),
        ):
            pass


def test_without_a_port_nothing_listens() -> None:
    with metrics_endpoint("127.0.0.1", None, list):
        pass
