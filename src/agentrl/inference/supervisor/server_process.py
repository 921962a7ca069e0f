"""The process of one inference server: its port, its start, and the proof that it is the one.

Ports are taken by whoever comes first, and a server needs up to minutes to come to listen. So the
port is reserved for it, and what answers there counts only if it is this process's own child.
"""

from pathlib import Path
from types import TracebackType
from typing import Self

from agentrl.config.sections import InferenceSection, ModelSection
from agentrl.inference.supervisor.server_commands import server_command
from agentrl.runtime.child_processes import Child, Supervisor
from agentrl.runtime.ports import ReservedPort, listens

_NAME = "engine"


class EngineProcess:
    """A server that is started and started again; a context manager that holds its port."""

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        inference: InferenceSection,
        model: ModelSection,
        log_prefix: str,
        seed: int,
    ) -> None:
        """Prepare; nothing is started.

        Args:
            supervisor: ends the process with its own context.
            inference: how it is started.
            model: which model it serves.
            log_prefix: path of the log file up to the port in its name.
            seed: of its sampling.
        """
        self._supervisor = supervisor
        self._inference = inference
        self._model = model
        self._log_prefix = log_prefix
        self._seed = seed
        self._reserved: ReservedPort | None = None
        self._child: Child | None = None
        self._has_listened = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._reserved is not None:
            self._reserved.close()

    async def start(self, model_path: Path, version: int) -> int:
        """Start it on the weights of a version and return its port.

        It keeps its port from one start to the next, unless it never came to listen there.

        Raises:
            ConfigError: no port is free.
        """
        inference = self._inference
        if self._reserved is None:
            self._reserved = ReservedPort(inference.inference_host, inference.inference_port)
        elif not self._has_listened:
            with self._reserved as lost:
                self._reserved = ReservedPort(inference.inference_host, lost.port + 1)
        port = self._reserved.port
        command = server_command(
            inference,
            self._model,
            model_path=model_path,
            port=port,
            version=version,
            seed=self._seed,
        )
        self._has_listened = False
        self._child = Child(_NAME, command, self.log_path(port), environment=self._environment())
        await self._supervisor.start(self._child)
        return port

    def log_path(self, port: int) -> Path:
        """Return the log file of the server on a port."""
        return Path(f"{self._log_prefix}{port}.log")

    def is_listening(self) -> bool:
        """Return whether the started process, and nobody else, listens on its port."""
        if not self._has_listened and self._child and self._child.pid and self._reserved:
            self._has_listened = listens(self._child.pid, self._reserved.port)
        return self._has_listened

    def log_tail(self) -> str:
        """Return the end of its log, for error messages."""
        return self._child.log_tail() if self._child else ""

    async def wait(self) -> int:
        """Return its exit status once it ended."""
        return await self._supervisor.wait(_NAME)

    async def discard(self) -> None:
        """Get rid of what is left of it, once it ended or hangs."""
        await self._supervisor.stop(_NAME, at_once=True)

    def _environment(self) -> dict[str, str]:
        """Return what the server finds in its environment: its keys, and how its threads wait."""
        keys = {
            "AGENTRL_API_KEY": self._inference.inference_api_key,
            "AGENTRL_ADMIN_KEY": self._inference.inference_admin_key,
        }
        given = {name: key.get_secret_value() for name, key in keys.items() if key is not None}
        return {
            # Threads that spin at barriers would take the cores that the other processes need.
            "OMP_WAIT_POLICY": "PASSIVE",
            # SGLang's /health samples a token otherwise, and so fails during a long pause.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            **given,
        }
