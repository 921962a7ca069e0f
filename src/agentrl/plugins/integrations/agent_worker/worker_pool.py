"""`AgentWorkerPool`: starts worker processes, and sends them rollouts and reward computations."""

import asyncio
import atexit
import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

from agentrl.errors import AgentWorkerError, UserCodeError
from agentrl.plugins.integrations.agent_worker.description import WorkerSettings
from agentrl.runtime.processes.request_process import RequestProcess
from agentrl.schema import AgentResult, MCPTask
from agentrl.schema.agent_endpoint import AgentEndpoint

_MAX_ROLLOUTS_PER_SERIAL_WORKER = 200
"""Rollouts after which a serial worker is replaced: AWorld's registries keep megabytes of each."""


class AgentWorkerPool:
    """Worker processes that start on first use."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self._workers: list[_WorkerProcess] = []

    @classmethod
    def load(cls, settings_path: Path) -> Self:
        """Return the workers of a settings file; they end with this process at the latest."""
        text = settings_path.read_text(encoding="utf-8")
        pool = cls(WorkerSettings.model_validate_json(text))
        atexit.register(pool.close)
        return pool

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers that were started."""
        return [worker.process_id for worker in self._workers]

    @property
    def num_busy(self) -> int:
        """Number of requests without an answer yet."""
        return sum(worker.num_busy for worker in self._workers)

    async def run(self, task: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
        """Run the agent on a task."""
        worker = self._least_busy()
        request = {
            "run": task.model_dump(mode="json", exclude={"kind"}),
            "endpoint": asdict(endpoint),
        }
        if not self.settings.serial:
            return AgentResult.from_json(await worker.ask(request))
        worker.num_waiting += 1
        worker.num_rollouts += 1
        try:
            async with worker.turn:
                return AgentResult.from_json(await worker.ask(request))
        finally:
            worker.num_waiting -= 1

    async def reward(self, arguments: dict[str, Any]) -> float:
        """Call the reward function with these keyword arguments, or `positional` ones."""
        return float(await self._least_busy().ask({"reward": arguments}))

    def close(self) -> None:
        """End the workers; running rollouts are lost."""
        while self._workers:
            self._workers.pop().close()

    def _least_busy(self) -> "_WorkerProcess":
        for worker in [worker for worker in self._workers if not worker.is_alive or worker.is_worn]:
            self._workers.remove(worker)
            worker.close()
        idle = next((worker for worker in self._workers if not worker.num_busy), None)
        if idle is not None:
            return idle
        if len(self._workers) < self.settings.processes:
            self._workers.append(_WorkerProcess(self.settings))
            return self._workers[-1]
        return min(self._workers, key=lambda worker: worker.num_busy)


class _WorkerProcess:
    """One worker process."""

    def __init__(self, settings: WorkerSettings) -> None:
        worker_settings = json.dumps({"agent": settings.agent, "reward": settings.reward})
        self._process = RequestProcess(
            "the agent's worker process",
            [
                settings.python,
                "-m",
                "agentrl.plugins.integrations.agent_worker.worker_main",
                worker_settings,
            ],
            # AWorld prints about a hundred lines per rollout, which its log files contain as well.
            {"AWORLD_DISABLE_CONSOLE_LOG": "true", **os.environ},
            encode=partial(json.dumps, default=_plain),
        )
        self.process_id = self._process.process_id
        self.close = self._process.close
        self._loop = asyncio.get_running_loop()
        self.turn = asyncio.Lock()
        self.num_waiting = 0
        self.num_rollouts = 0

    @property
    def is_alive(self) -> bool:
        """Whether it still accepts requests in this event loop."""
        return self._loop is asyncio.get_running_loop() and self._process.is_alive

    @property
    def is_worn(self) -> bool:
        """Whether it has run its maximum number of rollouts and is idle."""
        return self.num_rollouts >= _MAX_ROLLOUTS_PER_SERIAL_WORKER and not self.num_busy

    @property
    def num_busy(self) -> int:
        """Number of requests that are queued or without an answer yet."""
        return max(self.num_waiting, self._process.num_waiting)

    async def ask(self, request: dict[str, Any]) -> Any:
        """Return the result of a request."""
        reply = await self._process.ask(request)
        if "error" in reply:
            raise (AgentWorkerError if reply["lost"] else UserCodeError)(reply["error"])
        return reply["result"]


def _plain(value: Any) -> Any:
    """Convert numpy numbers and arrays, which training frameworks pass, to plain Python values."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"a {type(value).__name__} cannot be passed to the agent's process")
    return value.tolist()
