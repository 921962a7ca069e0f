"""Whether anything answers at an address, within seconds."""

import socket
import threading
from collections.abc import Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler

import pytest

from agentrl.runtime import outside
from agentrl.runtime.outside import no_answer


@pytest.fixture
def web_server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}/nowhere"
        server.shutdown()
        serving.join()


def test_whatever_is_answered_is_an_answer(web_server: str) -> None:
    assert no_answer(web_server) is None


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
    monkeypatch.setattr(outside, "_asked", lambda url: released.wait(60))
    assert no_answer("http://hub.example") == "no answer in 0.1 s"
    released.set()
