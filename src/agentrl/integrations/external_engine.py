"""What engines have in common that write files for another framework and start it."""

import os
import pprint
import re
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from agentrl.errors import AgentRLError, ConfigError
from agentrl.integrations.agent_worker.describe import describe
from agentrl.integrations.agent_worker.description import AgentDescription, plays_alone
from agentrl.integrations.agent_worker.interpreters import (
    check_can_play,
    checked_program,
    has_package,
)
from agentrl.integrations.reward_functions import RewardFunction
from agentrl.integrations.trainer_processor import TrainerProcessor


class ExternalEngine(TrainerProcessor):
    """Trains with a framework that runs in an interpreter of its own."""

    framework: ClassVar[str]
    """How people call it."""
    package: ClassVar[str]
    """Its Python package, which `scripts/setup_agents` knows it by, too."""

    def __init__(self, run_path: str | Path) -> None:
        super().__init__(run_path)
        self._description: AgentDescription | None = None
        self._environment: dict[str, str] = {}
        self._reward: RewardFunction | None = None
        self._files: dict[str, Path] = {}
        self._python = sys.executable

    @property
    @abstractmethod
    def command(self) -> list[str]:
        """The command that `train` runs, in an environment from `environment`."""

    @property
    def environment(self) -> dict[str, str]:
        """What `command` needs in its environment: the secrets, and the way to generated files."""
        path = os.pathsep.join(filter(None, [str(self.run_path), os.environ.get("PYTHONPATH")]))
        return {**self._environment, "PYTHONPATH": path}

    def check_agent(self, agent: Any) -> None:
        """Describe the agent; see `describe`."""
        self._description, self._environment = describe(agent)

    @property
    def _python_variable(self) -> str:
        return f"AGENTRL_{self.package.upper()}_PYTHON"

    def _take_own_settings(self, settings: dict[str, Any]) -> Any:
        """Take our keys out of the framework's; returns `agent_processes`, None if not given."""
        python_key = f"{self.package}_python"
        given = settings.pop(python_key, None)
        python = given if given is not None else os.environ.get(self._python_variable)
        self._python = sys.executable if python is None else checked_program(python_key, python)
        return settings.pop("agent_processes", None)

    def _module_name(self, suffix: str) -> str:
        assert self._description is not None, "the agent is checked first"
        name = re.sub(r"\W+", "_", self._description.name, flags=re.ASCII).strip("_").lower()
        return f"{name or 'agent'}_{suffix}"

    def _host_values(self, processes: Any) -> Mapping[str, Any]:
        """Return what the templates of generated modules say of the agent and its hosts.

        Args:
            processes: `agent_processes` as given, or None.

        Raises:
            ConfigError: it is no whole number from 1.
        """
        assert self._description is not None, "the agent is checked first"
        serial = plays_alone(self._description)
        if processes is None:
            processes = 4 if serial else 1
        if not isinstance(processes, int) or processes < 1:
            raise ConfigError(
                f"config: agent_processes must be a whole number from 1, got {processes!r}"
            )
        return {
            "name": self._description.name,
            "agent": pprint.pformat(self._description.model_dump(mode="json"), width=100),
            "python": sys.executable,
            "processes": processes,
            "serial": serial,
        }

    def _run(self, *overrides: str) -> None:
        """Run the framework to its end.

        Raises:
            ConfigError: it is not installed, or AWorld is not where its agents are to be played.
            AgentRLError: it failed; its own messages were printed.
        """
        assert self._description is not None, "AgentTrainer checks before it trains"
        environment = os.environ | self.environment
        if not has_package(self._python, self.package, environment):
            raise ConfigError(
                f"train_engine_name: {self.framework} is not installed for {self._python}; make an "
                f"environment with scripts/setup_agents {self.package} FOLDER, and set "
                f"{self._python_variable} to its Python"
            )
        check_can_play(self._description)
        command = [*self.command, *overrides]
        status = subprocess.run(command, env=environment, check=False).returncode
        if status != 0:
            raise AgentRLError(f"{self.framework} ended with status {status}; see its messages")
