"""The process of a `ScorerProcess`: `python -m agentrl.rewards.scorer_worker SOURCE PATHS`.

It exits when its stdin closes, and also after a function hangs, once the other functions have
finished.
"""

import asyncio
import base64
import faulthandler
import json
import logging
import pickle
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from agentrl.errors import AgentRLError, ConfigError, ScorerDefect, ScorerTimeout
from agentrl.rewards import MCPScorerFactory, load_scorer_module
from agentrl.rewards.rollout_view import NeedsWorld
from agentrl.runtime.logs import RepeatLimit
from agentrl.runtime.processes.request_server import Answer, RequestServer
from agentrl.runtime.telemetry.loop_watch import LoopWatch

_ADVICE = (
    "a scorer blocks all others; declare it with `def` instead of `async def`, or await an async "
    "client"
)
_HEARTBEAT_SECONDS = 5.0
_MARGIN_SECONDS = 10.0
"""Margin beyond a function's timeout for a blocked event loop (a blocking call in an async
function, or C code that holds the GIL)."""


class ScorerWorker:
    """Executes scoring requests."""

    def __init__(self, server: RequestServer) -> None:
        self._server = server
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._longest_seconds = 0.0
        self._is_hung = False

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result, and whether a hanging function was abandoned."""
        name, max_seconds, arguments = pickle.loads(base64.b64decode(request["call"]))
        self._longest_seconds = max(self._longest_seconds, max_seconds)
        self._heartbeat()  # now: the function may block this event loop before another task runs
        if self._heartbeat_task is None:
            self._heartbeat_task = asyncio.create_task(self._heartbeat_loop())
        try:
            result = json.loads(
                json.dumps(await self._run(name, max_seconds, arguments), default=_to_json)
            )
        except Exception as error:  # noqa: BLE001  a verdict may hold anything
            text = (
                f"scorer {name!r} returned a value that cannot be stored: {type(error).__name__}: "
                f"{error}"
            )
            result = _defect(text, text)
        return {"is_hung": self._is_hung, "result": result}

    async def _run(self, name: str, max_seconds: float, arguments: Any) -> dict[str, Any]:
        scorer = MCPScorerFactory.get_scorer(name)
        try:
            verdicts = await scorer.score_here(max_seconds, *arguments)
        except NeedsWorld as need:
            return {"needs": need.request}
        except ScorerDefect as defect:
            timed_out = isinstance(defect, ScorerTimeout)
            if timed_out:
                self._is_hung = True
                self._server.exit_when_idle()
            return _defect(str(defect), defect.kind, timed_out=timed_out)
        except ConfigError as error:
            return {"config_error": str(error)}
        except AgentRLError as error:
            return {"outage": str(error)}
        return {"verdicts": [asdict(verdict) for verdict in verdicts]}

    def _heartbeat(self) -> None:
        """Exit the process with a dump of all threads unless the next heartbeat arrives in time."""
        faulthandler.dump_traceback_later(self._longest_seconds + _MARGIN_SECONDS, exit=True)

    async def _heartbeat_loop(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            self._heartbeat()


def _defect(text: str, kind: str, *, timed_out: bool = False) -> dict[str, Any]:
    return {"defect": text, "kind": kind, "timed_out": timed_out}


def _to_json(value: Any) -> Any:
    """Convert non-JSON values of a verdict: NumPy numbers and arrays, or else their text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def main() -> None:
    """Serve until stdin closes; the arguments are the scorers' file or module, and its import path."""
    server = RequestServer(LoopWatch("the scorers' event loop", _ADVICE))
    sys.path += [path for path in json.loads(sys.argv[2]) if path not in sys.path]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(RepeatLimit())

    def load() -> Answer:
        load_scorer_module(sys.argv[1])
        return ScorerWorker(server).answer

    server.run(load)


if __name__ == "__main__":
    main()
