"""How each kind of inference server is started: SGLang, and those that plugins add."""

from collections.abc import Sequence
from typing import Protocol

from agentrl.config.sections import InferenceSection, ModelSection
from agentrl.errors import ConfigError
from agentrl.inference.supervisor.sglang_backend import SGLANG
from agentrl.plugin_registry import hooks, loaded_hook


class ServerBackend(Protocol):
    """One value of `--inference_backend`. Servers of all kinds have SGLang's HTTP interface."""

    @property
    def start_seconds(self) -> float:
        """Maximum time from its start until it responds."""

    def command(
        self, common: Sequence[str], *, inference: InferenceSection, model: ModelSection, seed: int
    ) -> list[str]:
        """Return the argv of a server.

        Args:
            common: flags that all kinds share, in SGLang's spelling: model, address, version, limits.
            inference: further settings.
            model: the served model.
            seed: seed of its sampling.

        Raises:
            ConfigError: it is not installed.
        """


def server_backend(name: str) -> ServerBackend:
    """Return the kind of server that `--inference_backend` names."""
    backend: ServerBackend | None = SGLANG if name == "sglang" else loaded_hook("servers", name)
    if backend is None:
        known = ", ".join(["sglang", *hooks("servers")])
        raise ConfigError(f"--inference_backend {name}: not installed (installed: {known})")
    return backend
