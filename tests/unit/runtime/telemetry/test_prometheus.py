import socket
from pathlib import Path

import httpx
import pytest
from prometheus_client.core import GaugeMetricFamily
from pydantic import SecretStr
from support.scrape import scrape

from agentrl.config.sections import RunSection
from agentrl.errors import ConfigError
from agentrl.runtime.http import http_servers
from agentrl.runtime.ports import free_port
from agentrl.runtime.telemetry.prometheus import KEY_FILE, metrics_endpoint


def section(output: Path, **values: object) -> RunSection:
    return RunSection.model_validate({"output_dir": output, **values})


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_scrape_asks_anew_and_the_port_is_free_afterwards(tmp_path: Path) -> None:
    values = iter([1.0, 2.0, 3.0])
    port = free_port()
    with metrics_endpoint(
        section(tmp_path, metrics_port=port),
        lambda: [GaugeMetricFamily("thing", "A thing.", value=next(values))],
    ):
        assert [scrape(port, tmp_path)[("thing", ())] for _ in range(2)] == [1.0, 2.0]
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


def test_who_has_no_key_reads_nothing(tmp_path: Path) -> None:
    """The key of a run is made by its first process, kept in a private file, and used by all."""
    ports = free_port(), free_port()
    trainer, sampler = (section(tmp_path / "output", metrics_port=port) for port in ports)
    with metrics_endpoint(trainer, list), metrics_endpoint(sampler, list):
        file = tmp_path / "output" / KEY_FILE
        key = file.read_text()
        assert len(key) >= 40
        assert file.stat().st_mode & 0o777 == 0o600
        strangers: tuple[dict[str, str], ...] = (
            {},
            bearer("guess"),
            {"Authorization": "Bearer"},
            {"Authorization": key},
        )
        for port in ports:
            for path in ("metrics", "", "health"):
                url = f"http://127.0.0.1:{port}/{path}"
                for headers in strangers:
                    refused = httpx.get(url, headers=headers, trust_env=False)
                    assert (refused.status_code, refused.text) == (401, "")
                answer = httpx.get(url, headers=bearer(key), trust_env=False)
                assert answer.status_code == 200
    with metrics_endpoint(trainer, list):
        assert file.read_text() == key


def test_a_key_of_the_user_is_written_nowhere(tmp_path: Path) -> None:
    port = free_port()
    given = section(tmp_path, metrics_port=port, metrics_key=SecretStr("of-the-user"))
    with metrics_endpoint(given, list):
        url = f"http://127.0.0.1:{port}/metrics"
        answer = httpx.get(url, headers=bearer("of-the-user"), trust_env=False)
        assert answer.status_code == 200
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"--metrics_port {port}: cannot listen"),
            metrics_endpoint(section(tmp_path, metrics_port=port), list),
        ):
            pass


def test_without_a_port_nothing_listens(tmp_path: Path) -> None:
    with metrics_endpoint(section(tmp_path), list):
        assert list(tmp_path.iterdir()) == []


def test_what_a_web_page_asks_is_refused_and_half_a_request_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(http_servers, "HEAD_SECONDS", 0.5)
    port = free_port()
    with metrics_endpoint(section(tmp_path, metrics_port=port), list):
        url = f"http://127.0.0.1:{port}/metrics"
        keys = bearer((tmp_path / KEY_FILE).read_text())
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            refused = httpx.get(url, headers=keys | headers, trust_env=False)
            assert refused.status_code in (403, 421)
        halves = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(40)]
        for half in halves:
            half.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0")
        assert httpx.get(url, headers=keys, trust_env=False).status_code == 200
        assert [half.recv(1) for half in halves] == [b""] * 40
        for half in halves:
            half.close()
