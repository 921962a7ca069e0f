"""Spans on their way to collectors that take them, refuse them, hang, or are not there."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
from support.otlp_collector import otlp_collector

from agentrl.runtime.ports import free_port
from agentrl.runtime.telemetry import span_export as exporting
from agentrl.runtime.telemetry.span_export import span_export

MOST_SENT = 1 << 27
HANGING_SECONDS = 20.0
"""A maker of spans that waits for a request waits this long."""


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return our own lines."""
    return [one.getMessage() for one in caplog.records if one.name.startswith("agentrl")]


def make_spans(endpoint: str, number: int) -> None:
    """Make spans and end."""
    with span_export(endpoint, {"agentrl.run": "r"}) as tracer:
        for k in range(number):
            tracer.start_span(f"span {k}").end()


def test_every_span_arrives_and_says_whose_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with otlp_collector() as collector:
        make_spans(collector.url, 600)
    assert {span.name for span in collector.spans} == {f"span {k}" for k in range(600)}
    assert collector.resources[0]["service.name"] == "agentrl"
    assert collector.resources[0]["agentrl.run"] == "r"
    assert said(caplog) == []


def test_a_collector_that_is_not_there_costs_spans_and_they_are_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_REQUEST_SECONDS", 0.3)
    port = free_port()
    make_spans(f"http://127.0.0.1:{port}", 40)
    first, last = said(caplog)
    assert first.startswith(
        f"the collector at http://127.0.0.1:{port} does not accept spans (logged once"
    )
    assert last.startswith(f"40 of 40 spans did not reach http://127.0.0.1:{port}")


def test_spans_beyond_the_queue_are_counted_and_a_hanging_collector_is_not_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "QUEUE_SPANS", 50)
    monkeypatch.setattr(exporting, "BATCH_SPANS", 20)
    monkeypatch.setattr(exporting, "_REQUEST_SECONDS", HANGING_SECONDS)
    monkeypatch.setattr(exporting, "_SHUTDOWN_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        began = time.perf_counter()
        make_spans(f"http://127.0.0.1:{port}", 500)
        assert time.perf_counter() - began < HANGING_SECONDS
    assert said(caplog)[-1].startswith("500 of 500 spans did not reach")


def test_a_refusing_collector_is_quoted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with otlp_collector() as collector:
        collector.status = 401
        make_spans(collector.url, 1)
    first, last = said(caplog)
    assert "401" in first
    assert last.startswith("1 of 1 spans did not reach")


def test_a_collector_that_redirects_has_nothing_sent_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with otlp_collector() as collector, otlp_collector() as other:
        collector.status, collector.location = 307, f"{other.url}/v1/traces"
        make_spans(collector.url, 1)
    assert other.spans == []
    first, last = said(caplog)
    assert "redirects to another address" in first
    assert last.startswith("1 of 1 spans did not reach")


async def test_spans_do_not_hold_the_event_loop_while_a_collector_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporting, "_REQUEST_SECONDS", HANGING_SECONDS)
    monkeypatch.setattr(exporting, "_SHUTDOWN_SECONDS", 0.1)
    monkeypatch.setattr(exporting, "_PERIOD_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with span_export(endpoint, {}) as tracer:
            began = time.perf_counter()
            for _ in range(20):
                tracer.start_span("a").end()
                await asyncio.sleep(0.01)
            assert time.perf_counter() - began < HANGING_SECONDS


def test_a_reply_without_end_is_not_read_to_it(caplog: pytest.LogCaptureFixture) -> None:
    num_sent = 0

    def talk() -> None:
        nonlocal num_sent
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while num_sent < MOST_SENT:
                    num_sent += connection.send(bytes(1 << 20))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        talking = threading.Thread(target=talk)
        talking.start()
        make_spans(f"http://127.0.0.1:{listener.getsockname()[1]}", 1)
        talking.join()
    assert num_sent < MOST_SENT
    assert said(caplog) == []
