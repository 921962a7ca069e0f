"""Whether anything answers at an address, within seconds."""

import socket
import threading

import pytest

from agentrl.runtime.http import outside
from agentrl.runtime.http.outside import no_answer


def test_whatever_is_answered_is_an_answer(web_server: str) -> None:
    assert no_answer(f"{web_server}/nowhere") is None


def test_a_refusal_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert no_answer("http://127.0.0.1:1") == "[Errno 111] Connection refused"


def test_silence_is_told_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "ANSWER_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert no_answer(f"http://127.0.0.1:{silent.getsockname()[1]}") == "timed out"


def test_a_name_server_that_is_away_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(outside, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(outside, "_request_problem", lambda url: released.wait(60))
    assert no_answer("http://hub.example") == "no response within 0.1 s"
    released.set()
