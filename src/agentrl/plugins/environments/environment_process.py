"""`EnvironmentProcess`: an environment in the interpreter that has its package.

It lists and runs tasks; the model is reached through the rollout's `AgentEndpoint`.
Independent of the store and samplers.
"""

import asyncio
import base64
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from agentrl.config.sections import DataSection
from agentrl.errors import AgentError, AgentWorkerError, ConfigError
from agentrl.plugins.environments.environment_kinds import MAX_TASKS
from agentrl.plugins.environments.environment_uri import EnvironmentUri
from agentrl.runtime.printable import one_line
from agentrl.runtime.processes.request_process import RequestProcess
from agentrl.schema import AgentResult
from agentrl.schema.agent_endpoint import AgentEndpoint

START_SECONDS = 120.0
_MAX_ERROR_CHARS = 400
_HOST = Path(__file__).with_name("environment_host.py")
_INHERITED = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME", "HF_HOME"),
)


class EnvironmentProcess:
    """The process that holds one environment (context manager).

    Args:
        uri: the environment.
        section: its interpreter and environment variables.
        flag: the flag that names it, for messages.
        quiet: discard its output; otherwise it is written to this process's stderr.
    """

    def __init__(
        self,
        uri: EnvironmentUri,
        section: DataSection,
        flag: str = "--env",
        *,
        quiet: bool = False,
    ) -> None:
        self._uri = uri
        self._where = f"{flag} {uri.env_id}"
        self._python = uri.python(section.env_python)
        self._is_ready = False
        names = (*_INHERITED, *section.env_variables)
        self._process = RequestProcess(
            f"the process of {uri.env_id}",
            [self._python, str(_HOST), uri.kind, uri.name, json.dumps(uri.args)],
            _environment(names, self._python),
            quiet=quiet,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the process; running rollouts are lost."""
        self._process.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process is still running."""
        return self._process.is_alive

    def size(self) -> int:
        """Return the number of its tasks.

        Raises:
            ConfigError: its package is not installed, or does not have what the user named.
        """
        size = self._ask({"describe": True}).get("size")
        if type(size) is not int or not 0 < size <= MAX_TASKS:
            raise ConfigError(
                f"{self._where}: it has {one_line(str(size), 40)} tasks; expected 1 to {MAX_TASKS:,}"
            )
        return size

    def rows(self, numbers: Sequence[int]) -> list[Any]:
        """Return tasks by number: `query`, and the other fields that the environment provides.

        Raises:
            ConfigError: see `size`.
        """
        rows = self._ask({"rows": list(numbers)}).get("rows")
        if not isinstance(rows, list) or len(rows) != len(numbers):
            raise ConfigError(
                f"{self._where}: {len(numbers)} tasks were requested, but others were returned"
            )
        return rows

    async def ready(self) -> None:
        """Wait until the environment has loaded; if it fails, stop it so that another can start.

        Raises:
            AgentError: it fails to load, or the timeout expires.
        """
        if self._is_ready:
            return
        problem = f"it did not start within {START_SECONDS:g} s"
        try:
            async with asyncio.timeout(START_SECONDS):
                problem = self._problem_of(await self._process.ask({"describe": True}))
        except AgentWorkerError as error:
            problem = str(error)
        except TimeoutError:
            pass
        if problem:
            await asyncio.to_thread(self.close)
            raise AgentError(f"{self._uri.env_id} failed: {problem}")
        self._is_ready = True

    async def play(
        self, row: int, endpoint: AgentEndpoint, state: bytes | None = None
    ) -> AgentResult:
        """Run a task with the model at an endpoint.

        Args:
            row: number of the task.
            endpoint: the model.
            state: the snapshot of another rollout of the task, from which this one starts.

        Raises:
            AgentError: the environment failed, independently of the model.
        """
        text = None if state is None else base64.b64encode(state).decode()
        request = {"play": row, "endpoint": asdict(endpoint), "state": text}
        reply = await self._process.ask(request)
        try:
            return AgentResult.from_json(reply["result"])
        except (KeyError, TypeError) as error:  # the reply has no result, or one of another form
            problem = self._problem_of(reply) or f"it returned no rollout ({error})"
            raise AgentError(f"{self._uri.env_id} failed: {problem}") from None

    async def snapshot(self, endpoint: AgentEndpoint) -> bytes | None:
        """Return the state of the task that waits for a reply at an endpoint; None if it has none.

        Raises:
            AgentError: the environment failed.
        """
        reply = await self._process.ask({"snapshot": endpoint.api_key})
        problem = self._problem_of(reply)
        if problem:
            raise AgentError(f"{self._uri.env_id} failed: {problem}")
        state = reply.get("state")
        return None if state is None else base64.b64decode(state)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = self._process.ask_and_wait(request, START_SECONDS)
        except AgentWorkerError as error:
            raise ConfigError(f"{self._where}: {error}") from error
        except TimeoutError:
            raise ConfigError(
                f"{self._where}: it did not start within {START_SECONDS:g} s"
            ) from None
        problem = self._problem_of(reply)
        if problem:
            raise ConfigError(f"{self._where}: {problem}")
        return reply

    def _problem_of(self, reply: dict[str, Any]) -> str:
        """Return why an environment failed; empty if it did not."""
        missing = one_line(str(reply.get("missing", "")), _MAX_ERROR_CHARS)
        if missing.partition(".")[0].startswith(self._uri.kind):
            return (
                f"{missing} is not installed for {self._python}; install it with "
                f"`{self._uri.install_command()}`, or select a Python that has it with --env_python"
            )
        if missing:
            return f"it requires {missing}, which is not installed for {self._python}"
        return one_line(str(reply.get("mistake") or reply.get("error") or ""), _MAX_ERROR_CHARS)


def _environment(names: Sequence[str], python: str) -> dict[str, str]:
    """Return these variables of this process, with the interpreter's directory first in PATH."""
    values = {name: os.environ[name] for name in names if name in os.environ}
    path = values.get("PATH", os.defpath)
    return {**values, "PATH": f"{Path(python).parent}{os.pathsep}{path}"}
