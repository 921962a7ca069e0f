"""Whether anything answers at an address, within seconds."""

import socket
import threading

import pytest

from agentrl.runtime.http import http_clients
from agentrl.runtime.http.http_clients import unreachable_reason


def test_whatever_is_answered_is_an_answer(web_server: str) -> None:
    assert unreachable_reason(f"{web_server}/nowhere") is None


def test_a_refusal_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unreachable_reason("http://127.0.0.1:1") == "[Errno 111] Connection refused"


def test_silence_is_told_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_clients, "ANSWER_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert unreachable_reason(f"http://127.0.0.1:{silent.getsockname()[1]}") == "timed out"


def test_a_name_server_that_is_away_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(http_clients, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(http_clients, "_request_problem", lambda url: released.wait(60))
    assert unreachable_reason("http://hub.example") == "no response within 0.1 s"
    released.set()
