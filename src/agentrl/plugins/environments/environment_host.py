"""The host program of an environment, run by the interpreter that has its package.

Its arguments are a kind, a name and JSON with the environment's arguments. It uses the protocol of
`runtime.processes.request_process` and only the standard library:

    {"describe": true}               -> {"size": 20}           or {"mistake": ...}, {"missing": ...}
    {"rows": [0, 1, ...]}            -> {"rows": [{"query": ...}, ...]}
    {"play": 3, "endpoint": {...},
     "state": "..." | null}          -> {"result": {...}}      or {"error": ...}
    {"snapshot": API_KEY}            -> {"state": "..." | null} of the rollout with this key

The output of the environment's package goes to stderr.
"""

import base64
import json
import os
import sys
import threading
import traceback
import urllib.error
import urllib.request
from typing import Any, TextIO

from environment_kinds import (  # type: ignore[import-not-found]
    KINDS,
    Mistake,
    RolloutLimitReached,
    World,
    open_url,
)

_MAX_ERROR_CHARS = 300
_LIMITS = ("turns_limit", "time_limit", "context_length_exceeded")


class _ModelAtEndpoint:
    """Calls the model of one rollout.

    A snapshot is a line of JSON, the request that waits for its reply, and the state of the world.
    """

    def __init__(self, endpoint: dict[str, str], state: bytes | None) -> None:
        self.endpoint = endpoint
        self._state = state
        self._world: World | None = None
        self._asked = b""

    def begin(self, messages: list[dict[str, Any]], world: World) -> list[dict[str, Any]]:
        self._world = world
        if self._state is None:
            return messages
        asked, _, state = self._state.partition(b"\n")
        world.restore(state)
        reached: list[dict[str, Any]]
        reached, fields = json.loads(asked)
        for number, message in enumerate(reached):
            if message["role"] == "assistant":
                self(reached[:number], **fields)
        return reached

    def snapshot(self) -> bytes | None:
        state = None if self._world is None else self._world.snapshot()
        return None if state is None else b"\n".join((self._asked, state))

    def __call__(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        if self._world is not None:
            self._asked = json.dumps([messages, fields]).encode()
        body = {"model": self.endpoint["model"], "messages": messages, **fields}
        request = urllib.request.Request(
            f"{self.endpoint['base_url']}/chat/completions",
            json.dumps(body).encode(),
            {
                "Authorization": f"Bearer {self.endpoint['api_key']}",
                "Content-Type": "application/json",
            },
        )
        try:
            with open_url(request) as reply:
                message: dict[str, Any] = json.load(reply)["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            api_error = json.loads(error.read())["error"]
            if api_error["code"] in _LIMITS:
                raise RolloutLimitReached from None
            raise ConnectionError(api_error["message"]) from None
        return message


class _Host:
    def __init__(self, kind: str, name: str, args: dict[str, Any]) -> None:
        self._environment: Any = None
        self._models: dict[str, _ModelAtEndpoint] = {}
        self._failure: dict[str, Any] = {}
        try:
            self._environment = KINDS[kind](name, args)
        except Mistake as mistake:
            self._failure = {"mistake": str(mistake)}
        except ModuleNotFoundError as error:
            text = _error_line(error)
            self._failure = {"missing": error.name} if error.name else {"mistake": text}
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a package may raise anything)
            traceback.print_exc()
            self._failure = {"mistake": _error_line(error)}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._environment is None:
            return self._failure
        try:
            if "describe" in request:
                return {"size": self._environment.size}
            if "rows" in request:
                return {"rows": [self._environment.row(number) for number in request["rows"]]}
            if "snapshot" in request:
                model = self._models.get(request["snapshot"])
                return {"state": None if model is None else _as_text(model.snapshot())}
            return {"result": self._play(**request)}
        except RolloutLimitReached:
            return {"result": {"answer": None}}
        except (Exception, SystemExit) as error:  # noqa: BLE001  (it fails the attempt only)
            traceback.print_exc()
            return {"error": _error_line(error)}

    def _play(self, play: int, endpoint: dict[str, str], state: str | None, **_: Any) -> Any:
        given = None if state is None else base64.b64decode(state)
        model = self._models[endpoint["api_key"]] = _ModelAtEndpoint(endpoint, given)
        try:
            return self._environment.play(play, model)
        finally:
            del self._models[endpoint["api_key"]]


def _as_text(state: bytes | None) -> str | None:
    return None if state is None else base64.b64encode(state).decode()


def _error_line(error: BaseException) -> str:
    """Return an error in one line, without emphasis marks (`*`)."""
    words = f"{type(error).__name__}: {error}".replace("*", "").split()
    return " ".join(words)[:_MAX_ERROR_CHARS]


def main() -> None:
    """Answer requests until stdin closes."""
    replies, lock = os.fdopen(os.dup(1), "w", encoding="utf-8"), threading.Lock()
    os.dup2(2, 1)
    host = _Host(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))

    def handle(request: dict[str, Any]) -> None:
        _send(replies, lock, {"id": request["id"], **host.answer(request)})

    for line in sys.stdin:
        request = json.loads(line)
        # A cancellation needs no action: the endpoint refuses the calls of a rollout that is over.
        if "cancel" not in request:
            threading.Thread(target=handle, args=(request,), daemon=True).start()
    sys.stderr.flush()
    os._exit(0)  # do not wait for the threads of running rollouts


def _send(replies: TextIO, lock: threading.Lock, reply: dict[str, Any]) -> None:
    try:
        text = json.dumps(reply, default=float)
    except (TypeError, ValueError, RecursionError) as error:
        text = json.dumps(
            {"id": reply["id"], "error": f"its reply is not JSON-serializable: {error}"}
        )
    with lock:
        replies.write(text + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
