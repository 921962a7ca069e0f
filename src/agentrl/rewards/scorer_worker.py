"""The process of a `ScorerProcess`: `python -m agentrl.rewards.scorer_worker SOURCE PATHS`.

One JSON request a line on stdin, one JSON reply a line on stdout, in any order. What the functions print
goes to stderr. It ends when its stdin does, and by itself once a function hangs: then after the others.
"""

import asyncio
import base64
import contextlib
import faulthandler
import json
import logging
import os
import pickle
import sys
import threading
from dataclasses import asdict
from typing import Any, TextIO

from agentrl.errors import AgentRLError, ConfigError, ScorerDefect, ScorerTimeout
from agentrl.rewards import MCPScorerFactory, load_scorer_module
from agentrl.runtime.loop_watch import LoopWatch

_ADVICE = "a scorer blocks the others; write `def` instead of `async def`, or await an async client"
_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 10.0
"""How much longer than a function may take the event loop may stand still: a blocking call in an async
function, or the interpreter lock kept by C code."""


class ScorerWorker:
    """Judges what is asked for, each in a task of its own."""

    def __init__(self, asked: TextIO, replies: TextIO) -> None:
        self._asked, self._replies = asked, replies
        self._requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._longest_seconds = 0.0
        self._is_worn = False

    async def serve(self) -> None:
        """Answer requests until stdin ends, or until a function was left behind that hangs."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        beating = asyncio.create_task(self._beat())
        with LoopWatch("the scorers' event loop", _ADVICE).watching(loop):
            while (request := await self._requests.get()) is not None:
                self._take(request)
        beating.cancel()

    def _take(self, request: dict[str, Any]) -> None:
        number = request["id"]
        if "cancel" not in request:
            self._running[number] = asyncio.create_task(self._answer(number, request["call"]))
        elif number in self._running:
            self._running[number].cancel()

    async def _answer(self, number: int, call: str) -> None:
        name, max_seconds, arguments = pickle.loads(base64.b64decode(call))
        self._longest_seconds = max(self._longest_seconds, max_seconds)
        try:
            reply = self._reply(number, await self._judged(name, max_seconds, arguments))
        except Exception as error:  # noqa: BLE001  a verdict may hold anything
            text = (
                f"scorer {name!r} returned what cannot be stored: {type(error).__name__}: {error}"
            )
            reply = self._reply(number, _defect(text, text))
        finally:
            del self._running[number]
            if self._is_worn and not self._running:
                self._requests.put_nowait(None)
        self._replies.write(reply + "\n")
        self._replies.flush()

    def _reply(self, number: int, found: dict[str, Any]) -> str:
        reply = {"id": number, "is_worn": self._is_worn, "found": found}
        return json.dumps(reply, default=_plain)

    async def _judged(self, name: str, max_seconds: float, arguments: Any) -> dict[str, Any]:
        scorer = MCPScorerFactory.get_scorer(name)
        try:
            verdicts = await scorer.judge_here(max_seconds, *arguments)
        except ScorerDefect as defect:
            timed_out = isinstance(defect, ScorerTimeout)
            self._is_worn |= timed_out
            return _defect(str(defect), defect.kind, timed_out=timed_out)
        except ConfigError as error:
            return {"lacking": str(error)}
        except AgentRLError as error:
            return {"outage": str(error)}
        return {"verdicts": [asdict(verdict) for verdict in verdicts]}

    async def _beat(self) -> None:
        """Have the process end, and say where every thread is, when this loop stands still."""
        while True:
            faulthandler.dump_traceback_later(self._longest_seconds + _SILENT_SECONDS, exit=True)
            await asyncio.sleep(_BEAT_SECONDS)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            for line in self._asked:
                loop.call_soon_threadsafe(self._requests.put_nowait, json.loads(line))
            loop.call_soon_threadsafe(self._requests.put_nowait, None)


def _defect(text: str, kind: str, *, timed_out: bool = False) -> dict[str, Any]:
    return {"defect": text, "kind": kind, "timed_out": timed_out}


def _plain(value: Any) -> Any:
    """Return what a verdict holds beside JSON's types: numbers and arrays of NumPy, or its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def main() -> None:
    """Serve until stdin ends; the arguments are the scorers' file or module, and where it imports from."""
    # The functions may read and print what they like: the pipes of the requests are out of their way.
    asked, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.path += [place for place in json.loads(sys.argv[2]) if place not in sys.path]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        load_scorer_module(sys.argv[1])
    except ConfigError as error:
        replies.write(json.dumps({"id": 0, "error": str(error)}) + "\n")
        replies.flush()
        sys.exit(2)
    asyncio.run(ScorerWorker(asked, replies).serve())
    # Threads that hang must not keep the process alive.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
