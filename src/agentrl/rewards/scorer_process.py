"""`ScorerProcess`: runs the scoring functions of one of the user's files.

Input: the name of a scorer and its arguments. Output: verdicts, or the reason for a missing one.
The functions run in a child process (`scorer_worker`), because they may crash, hang, or hold the
GIL in a regular expression; some execute code written by a model. Requests are pickled. Replies are
JSON, so nothing from the child is executed here.
"""

import asyncio
import atexit
import base64
import json
import os
import pickle
import sys
from typing import Any

from agentrl.errors import AgentWorkerError, ConfigError, ScorerDefect, ScorerTimeout, ScoringError
from agentrl.rewards.rollout_view import NeedsWorld
from agentrl.runtime.processes.request_process import RequestProcess

_MAX_ISOLATED_RETRIES = 2
"""Maximum number of concurrent retries, each alone in its own process."""


class ScorerProcess:
    """A child process that is started when it is first needed, and again after its end."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._shared: RequestProcess | None = None
        self._isolated_retries = asyncio.Semaphore(_MAX_ISOLATED_RETRIES)
        atexit.register(self.close)

    async def score(self, name: str, max_seconds: float, *arguments: Any) -> list[dict[str, Any]]:
        """Return the fields of the `Verdict`s on one answer, or on the rollouts of a group.

        Args:
            name: name of the scorer.
            max_seconds: timeout of its function.
            *arguments: picklable arguments of the function.
        """
        call = base64.b64encode(pickle.dumps((name, max_seconds, arguments))).decode()
        if self._shared is None or not self._shared.is_alive:
            self._shared = self._start()
        process = self._shared
        try:
            reply = await process.ask({"call": call})
        except AgentWorkerError:
            # Any of the running functions may have crashed the process: this one is retried alone.
            async with self._isolated_retries:
                reply = await self._retry_isolated(name, call)
        else:
            if reply["is_hung"] and process is self._shared:
                self._shared = None  # a function hangs there; the process exits after the others
        return _verdicts(reply["result"])

    def close(self) -> None:
        """Stop the process; scorings in progress are lost."""
        process, self._shared = self._shared, None
        if process is not None:
            process.close()

    async def _retry_isolated(self, name: str, call: str) -> dict[str, Any]:
        process = self._start()
        try:
            return await process.ask({"call": call})
        except AgentWorkerError as end:
            text = f"scorer {name!r} returned no score: {end}"
            raise ScorerDefect(text, kind=text, is_certain=True) from None
        finally:
            await asyncio.to_thread(process.close)

    def _start(self) -> RequestProcess:
        # The paths make the same modules importable; an environment variable would also affect the
        # child processes of the scorers.
        paths = json.dumps([path for path in sys.path if path])
        return RequestProcess(
            "its process",
            [sys.executable, "-P", "-m", "agentrl.rewards.scorer_worker", self._source, paths],
            os.environ,
        )


def _verdicts(result: dict[str, Any]) -> list[dict[str, Any]]:
    if "needs" in result:
        raise NeedsWorld(result["needs"])
    if "defect" in result:
        timed_out = bool(result["timed_out"])
        error_class = ScorerTimeout if timed_out else ScorerDefect
        raise error_class(str(result["defect"]), kind=str(result["kind"]), is_certain=timed_out)
    if "config_error" in result:
        raise ConfigError(str(result["config_error"]))
    if "outage" in result:
        raise ScoringError(str(result["outage"]))
    verdicts: list[dict[str, Any]] = result["verdicts"]
    return verdicts
