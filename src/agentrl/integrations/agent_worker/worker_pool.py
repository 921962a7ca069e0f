"""The other side of hosts: starts them and asks them."""

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import subprocess
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from agentrl.schema import MCPTask

_END_SECONDS = 5.0
_PLAYS_OF_A_SERIAL_HOST = 200
"""Rollouts after which a serial host is replaced: AWorld's registries keep some megabytes of each."""


class HostSettings(BaseModel):
    """What hosts are started with; the contents of `hosts.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: str
    """The interpreter."""
    processes: int
    """Hosts of one sampler."""
    serial: bool
    """One rollout at a time in each. AWorld finds agents by their ids in a registry of the process,
    and at the end of a task it closes the tools of every agent that is there."""
    agent: dict[str, Any] | None
    takes_all: bool
    """Whether the endpoint takes calls for all models; see `Endpoint`."""
    reward: str | None
    reward_form: str | None


class EndpointLike(Protocol):
    """`Endpoint`, or what the gateway has in its place."""

    @property
    def base_url(self) -> str:
        """OpenAI-compatible address."""

    @property
    def model(self) -> str:
        """Name of the trained model."""

    @property
    def api_key(self) -> str:
        """Bearer key of the address."""


class HostFailed(ConnectionError):
    """A host ended, or something that it needs did; the agent is not to blame."""


class AgentFailed(Exception):
    """The user's code raised."""


class AgentHosts:
    """Some host processes, started when they are first needed."""

    def __init__(self, settings: HostSettings) -> None:
        self.settings = settings
        self._hosts: list[_Host] = []

    async def play(self, task: MCPTask, endpoint: EndpointLike) -> str | None:
        """Play a task: an agent function for `agentrl.rollout.agent`.

        Raises:
            HostFailed: a host ended, or could not reach what it needs.
            AgentFailed: the agent raised.
        """
        host = self._least_busy()
        request = {
            "play": task.model_dump(mode="json", exclude={"kind"}),
            "endpoint": {
                "base_url": endpoint.base_url,
                "model": endpoint.model,
                "api_key": endpoint.api_key,
                "takes_all": self.settings.takes_all,
            },
        }
        if not self.settings.serial:
            answer: str | None = await host.ask(request)
            return answer
        host.num_waiting += 1
        host.num_plays += 1
        try:
            async with host.turn:
                answer = await host.ask(request)
        finally:
            host.num_waiting -= 1
        return answer

    async def reward(self, arguments: dict[str, Any]) -> float:
        """Call the reward function with these keyword arguments, or `positional` ones.

        Raises:
            HostFailed: a host ended.
            AgentFailed: the function raised.
        """
        return float(await self._least_busy().ask({"reward": arguments}))

    def close(self) -> None:
        """End the hosts; what they still play is lost."""
        while self._hosts:
            self._hosts.pop().close()

    def _least_busy(self) -> "_Host":
        for host in [host for host in self._hosts if not host.is_alive or host.is_worn]:
            self._hosts.remove(host)
            host.close()
        idle = next((host for host in self._hosts if not host.num_busy), None)
        if idle is not None:
            return idle
        if len(self._hosts) < self.settings.processes:
            self._hosts.append(_Host(self.settings))
            return self._hosts[-1]
        return min(self._hosts, key=lambda host: host.num_busy)


class _Host:
    """One host process."""

    def __init__(self, settings: HostSettings) -> None:
        wanted = json.dumps({"agent": settings.agent, "reward": settings.reward})
        self._process = subprocess.Popen(
            [settings.python, "-m", "agentrl.integrations.agent_worker.worker_main", wanted],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            # AWorld prints some hundred lines a rollout, which its log files hold too.
            env={"AWORLD_DISABLE_CONSOLE_LOG": "true", **os.environ},
        )
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._end = ""
        self.turn = asyncio.Lock()
        self.num_waiting = 0
        self.num_plays = 0
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    @property
    def is_alive(self) -> bool:
        """Whether it still takes requests, in this event loop."""
        is_ours = self._loop is asyncio.get_running_loop()
        return is_ours and not self._end and self._process.poll() is None

    @property
    def is_worn(self) -> bool:
        """Whether it played its share, and nothing is going on in it."""
        return self.num_plays >= _PLAYS_OF_A_SERIAL_HOST and not self.num_busy

    @property
    def num_busy(self) -> int:
        """Requests that wait for an answer, or for their turn."""
        return max(self.num_waiting, len(self._waiting))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._listening.join()

    async def ask(self, request: dict[str, Any]) -> Any:
        """Return the result of a request.

        Raises:
            HostFailed: the process ended, or something that it needs did not answer.
            AgentFailed: the user's code raised.
        """
        number = next(self._numbers)
        self._waiting[number] = self._loop.create_future()
        try:
            self._send({"id": number, **request})
            return await self._waiting[number]
        except asyncio.CancelledError:
            self._send({"id": number, "cancel": True})
            raise
        finally:
            del self._waiting[number]

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request, default=_plain) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise HostFailed(f"the agent's host process ended ({error.strerror})") from error

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as replies:
            for line in replies:
                self._from_thread(self._answered, json.loads(line))
        self._from_thread(self._ended, self._process.wait())

    def _from_thread(self, function: Callable[[Any], None], argument: Any) -> None:
        # The loop may be closed by then; then nobody waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, argument)

    def _answered(self, reply: dict[str, Any]) -> None:
        if reply["id"] == 0:
            self._end = reply["error"]
            return
        future = self._waiting.get(reply["id"])
        if future is None or future.done():
            return
        if "error" in reply:
            failure = HostFailed if reply["lost"] else AgentFailed
            future.set_exception(failure(reply["error"]))
        else:
            future.set_result(reply["result"])

    def _ended(self, status: int) -> None:
        self._end = self._end or f"the agent's host process ended with status {status}"
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(HostFailed(self._end))


def _plain(value: Any) -> Any:
    """Return a number or an array of numpy's as Python's: training frameworks pass such values."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"a {type(value).__name__} cannot be passed to the agent's process")
    return value.tolist()


@cache
def hosts_of(settings_path: Path) -> AgentHosts:
    """Return the hosts that a generated module names, the same ones whenever it is imported."""
    text = settings_path.read_text(encoding="utf-8")
    hosts = AgentHosts(HostSettings.model_validate_json(text))
    atexit.register(hosts.close)
    return hosts
