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
from agentrl.runtime.loop_watch import LoopWatch
from agentrl.runtime.request_server import Answer, RequestServer

_ADVICE = (
    "a scorer blocks all others; declare it with `def` instead of `async def`, or await an async "
    "client"
)
_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 10.0
"""Margin beyond a function's timeout for a blocked event loop (a blocking call in an async
function, or C code that holds the GIL)."""


class ScorerWorker:
    """Executes scoring requests."""

    def __init__(self, server: RequestServer) -> None:
        self._server = server
        self._beating: asyncio.Task[None] | None = None
        self._longest_seconds = 0.0
        self._is_worn = False

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result, and whether a hanging function was abandoned."""
        name, max_seconds, arguments = pickle.loads(base64.b64decode(request["call"]))
        self._longest_seconds = max(self._longest_seconds, max_seconds)
        self._beat()  # at once: the function may stop this loop before anything else runs
        if self._beating is None:
            self._beating = asyncio.create_task(self._keep_beating())
        try:
            found = json.loads(
                json.dumps(await self._judged(name, max_seconds, arguments), default=_plain)
            )
        except Exception as error:  # noqa: BLE001  a verdict may hold anything
            text = (
                f"scorer {name!r} returned a value that cannot be stored: {type(error).__name__}: "
                f"{error}"
            )
            found = _defect(text, text)
        return {"is_worn": self._is_worn, "found": found}

    async def _judged(self, name: str, max_seconds: float, arguments: Any) -> dict[str, Any]:
        scorer = MCPScorerFactory.get_scorer(name)
        try:
            verdicts = await scorer.judge_here(max_seconds, *arguments)
        except ScorerDefect as defect:
            timed_out = isinstance(defect, ScorerTimeout)
            if timed_out:
                self._is_worn = True
                self._server.end_after_these()
            return _defect(str(defect), defect.kind, timed_out=timed_out)
        except ConfigError as error:
            return {"lacking": str(error)}
        except AgentRLError as error:
            return {"outage": str(error)}
        return {"verdicts": [asdict(verdict) for verdict in verdicts]}

    def _beat(self) -> None:
        """Exit the process with a dump of all threads unless the next heartbeat arrives in time."""
        faulthandler.dump_traceback_later(self._longest_seconds + _SILENT_SECONDS, exit=True)

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            self._beat()


def _defect(text: str, kind: str, *, timed_out: bool = False) -> dict[str, Any]:
    return {"defect": text, "kind": kind, "timed_out": timed_out}


def _plain(value: Any) -> Any:
    """Convert non-JSON values of a verdict: NumPy numbers and arrays, or else their text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def main() -> None:
    """Serve until stdin closes; the arguments are the scorers' file or module, and its import path."""
    server = RequestServer(LoopWatch("the scorers' event loop", _ADVICE))
    sys.path += [place for place in json.loads(sys.argv[2]) if place not in sys.path]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")

    def load() -> Answer:
        load_scorer_module(sys.argv[1])
        return ScorerWorker(server).answer

    server.run(load)


if __name__ == "__main__":
    main()
