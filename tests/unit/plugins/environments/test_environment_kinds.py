"""What a policy says to an environment is its move, whatever it is."""

import threading
import urllib.error
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from agentrl.plugins.environments.environment_kinds import (
    KINDS,
    MAX_TASKS,
    Mistake,
    _as_action,
    _check_arguments,
    open_url,
)
from agentrl.plugins.environments.environment_uri import ENVIRONMENTS

SCHEMA = {"required": ["guess"]}


def test_every_kind_that_flags_name_is_implemented() -> None:
    assert KINDS.keys() == ENVIRONMENTS.keys()


def test_a_reply_that_is_no_json_is_an_action_of_one_field() -> None:
    assert _as_action('```json\n{"guess": 7}\n```', SCHEMA) == {"guess": 7}
    assert _as_action("crane", SCHEMA) == {"guess": "crane"}
    assert _as_action("[" * 100_000, SCHEMA) == {"guess": "[" * 100_000}
    assert _as_action("9" * 5_000, SCHEMA) == {"guess": "9" * 5_000}


@pytest.mark.parametrize("size", [0, -1, MAX_TASKS + 1, 10**12])
def test_a_size_beyond_what_a_run_takes_is_refused_before_tasks_are_listed(size: int) -> None:
    _check_arguments({"size": MAX_TASKS}, {"size": 500})
    with pytest.raises(Mistake, match=f"size={size}: expected a number from 1 to {MAX_TASKS:,}"):
        _check_arguments({"size": size}, {"size": 500})


def test_a_server_that_redirects_is_not_followed() -> None:
    asked = []

    class Redirects(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Redirects) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with pytest.raises(urllib.error.HTTPError, match="302"):
            open_url(f"http://127.0.0.1:{server.server_address[1]}/schema")
        server.shutdown()
    assert asked == ["/schema"]
