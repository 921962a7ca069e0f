import socket

import httpx
import pytest
from prometheus_client.core import GaugeMetricFamily
from support.scrape import scrape

from agentrl.errors import ConfigError
from agentrl.runtime.http import request_deadlines
from agentrl.runtime.ports import free_port
from agentrl.runtime.telemetry.prometheus import metrics_endpoint


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


def test_what_a_web_page_asks_is_refused_and_half_a_request_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_deadlines, "HEAD_SECONDS", 0.5)
    port = free_port()
    with metrics_endpoint("127.0.0.1", port, list):
        url = f"http://127.0.0.1:{port}/metrics"
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            assert httpx.get(url, headers=headers, trust_env=False).status_code in (403, 421)
        halves = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(40)]
        for half in halves:
            half.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0")
        assert httpx.get(url, trust_env=False).status_code == 200
        assert [half.recv(1) for half in halves] == [b""] * 40
        for half in halves:
            half.close()
