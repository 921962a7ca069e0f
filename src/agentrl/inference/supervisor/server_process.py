"""The process of one inference server: its command line, its port, its start and its end.

Any process may take a free port, and a server may need minutes before it listens. Its port is
therefore reserved, and a response counts only if this process's own child is listening there.
"""

from pathlib import Path
from typing import Self

from agentrl.addresses import is_loopback
from agentrl.config.sections import InferenceSection, ModelSection
from agentrl.errors import ConfigError
from agentrl.inference.supervisor.server_backend import server_backend
from agentrl.runtime.ports import ReservedPort, listens
from agentrl.runtime.processes.child_processes import Child, Supervisor

_NAME = "engine"


def server_command(
    inference: InferenceSection,
    model: ModelSection,
    *,
    model_path: Path,
    port: int,
    version: int,
    seed: int,
) -> list[str]:
    """Return the argv of an inference server that starts on the weights of `model_path`.

    The embedded engine loads further weights only from below `inference.weight_roots`.

    Keys are not on the command line, where every user of the machine could read them; all
    backends read `AGENTRL_API_KEY` and `AGENTRL_ADMIN_KEY` from their environment.
    """
    argv = ["--model-path", str(model_path), "--host", inference.inference_host]
    argv += ["--port", str(port), "--weight-version", str(version)]
    argv += ["--max-running-requests", str(inference.max_running_requests)]
    if inference.context_length is not None:
        argv += ["--context-length", str(inference.context_length)]
    backend = server_backend(inference.inference_backend)
    return backend.command(argv, inference=inference, model=model, seed=seed)


def check_keys(inference: InferenceSection) -> None:
    """Refuse to start servers that other machines can reach and whose clients could control them."""
    if not is_loopback(inference.inference_host) and inference.inference_admin_key is None:
        raise ConfigError(
            f"--inference_host {inference.inference_host} is reachable from outside, and anyone "
            "with the API key could replace the weights; set AGENTRL_ADMIN_KEY as well"
        )


class ServerProcess:
    """A server that is started and restarted; a context manager that holds its port."""

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        inference: InferenceSection,
        model: ModelSection,
        log_prefix: str,
        seed: int,
    ) -> None:
        """Prepare without starting anything."""
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

    def __exit__(self, *_: object) -> None:
        if self._reserved is not None:
            self._reserved.close()

    async def start(self, model_path: Path, version: int) -> int:
        """Start the server on the weights of a version and return its port.

        A restart uses the same port, unless the server never listened there.
        """
        inference = self._inference
        if self._reserved is None:
            self._reserved = ReservedPort(inference.inference_host, inference.inference_port)
        elif not self._has_listened:
            with self._reserved as previous:
                self._reserved = ReservedPort(inference.inference_host, previous.port + 1)
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
        """Return the log file of a server on the given port."""
        return Path(f"{self._log_prefix}{port}.log")

    def is_listening(self) -> bool:
        """Return whether the started process, and not another one, listens on its port."""
        if not self._has_listened and self._child and self._child.pid and self._reserved:
            self._has_listened = listens(self._child.pid, self._reserved.port)
        return self._has_listened

    def log_tail(self) -> str:
        """Return the end of the server's log, for error messages."""
        return self._child.log_tail() if self._child else ""

    async def wait(self) -> int:
        """Return the exit status once the process has ended."""
        return await self._supervisor.wait(_NAME)

    async def discard(self) -> None:
        """Kill the rest of the process group after the server has exited or hung."""
        await self._supervisor.stop(_NAME, at_once=True)

    def _environment(self) -> dict[str, str]:
        """Return the additions to the server's environment, its keys among them."""
        keys = {
            "AGENTRL_API_KEY": self._inference.inference_api_key,
            "AGENTRL_ADMIN_KEY": self._inference.inference_admin_key,
        }
        environment_keys = {
            name: key.get_secret_value() for name, key in keys.items() if key is not None
        }
        return {
            # SGLang's /health otherwise samples a token and therefore fails during a long pause.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            **environment_keys,
        }
