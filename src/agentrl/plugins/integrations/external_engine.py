"""Base of the engines that write files for another framework and start it."""

import os
import re
import sys
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import yaml

from agentrl.errors import AgentRLError, ConfigError
from agentrl.plugins.integrations.agent_worker.describe import describe
from agentrl.plugins.integrations.agent_worker.description import (
    AgentDescription,
    check_can_run,
    worker_settings,
    write_worker_settings,
)
from agentrl.plugins.integrations.engine_settings import (
    checked_program,
    has_package,
    load_settings,
    nested,
    refuse_settings_of,
)
from agentrl.plugins.integrations.question_rows import warn_of_equal_files, write_questions
from agentrl.plugins.integrations.reward_functions import RewardFunction, check_reward_function
from agentrl.plugins.integrations.trainer_processor import TrainerProcessor
from agentrl.runtime.processes.child_processes import run_to_end


class ExternalEngine(TrainerProcessor):
    """Trains with a framework that runs in a separate interpreter."""

    framework: ClassVar[str]
    """The display name."""
    package: ClassVar[str]
    """Its Python package, which is also its name for `scripts/setup_agents`."""
    needs_all: ClassVar[bool] = False
    """It has neither questions nor scorers of its own: both must be passed."""

    def __init__(self, run_path: str | Path) -> None:
        super().__init__(run_path)
        self._description: AgentDescription | None = None
        self._environment: dict[str, str] = {}
        self._reward: RewardFunction | None = None
        self._files: dict[str, Path] = {}
        self._questions: list[Path] = []
        self._python = sys.executable
        self._processes: object = None

    @property
    @abstractmethod
    def config_path(self) -> Path:
        """The configuration that the framework starts with."""

    @property
    @abstractmethod
    def output_path(self) -> Path:
        """The folder of training results."""

    @property
    @abstractmethod
    def command(self) -> list[str]:
        """The command that `train` runs, in an environment from `environment`."""

    @abstractmethod
    def _convert_questions(self, questions: Path, split: str) -> Path:
        """Convert a question file to the framework's format; return the new file."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment of `command`: the secrets, and the path to generated files."""
        path = os.pathsep.join(filter(None, [str(self.run_path), os.environ.get("PYTHONPATH")]))
        return {**self._environment, "PYTHONPATH": path}

    def check_agent(self, agent: Any) -> None:
        """Describe the agent; see `describe`."""
        self._description, self._environment = describe(agent, self.run_path)

    def check_dataset(self, dataset: Any, test_dataset: Any = None) -> None:
        """Write the questions of each dataset in the framework's format."""
        for split, value in (("train", dataset), ("test", test_dataset)):
            if value is not None:
                questions = self.run_path / f"{split}_data.jsonl"
                write_questions(value, questions, f"{split}_dataset")
                self._files[split] = self._convert_questions(questions, split)
                self._questions.append(questions)
        if self.needs_all and "train" not in self._files:
            raise ConfigError("train_dataset: missing; pass it")
        if len(self._questions) == 2:
            warn_of_equal_files(*self._questions)

    def check_reward(self, reward_func: Any) -> None:
        """Find the reward function, which the framework calls with four arguments by name."""
        if reward_func is None:
            if self.needs_all:
                raise ConfigError(
                    f"reward_func: missing; {self.framework} has no scorers, so pass a function"
                )
            return
        questions = next(iter(self._questions), None)
        self._reward = check_reward_function(reward_func, self.run_path, questions)
        if self._reward.form != "aworld":
            raise ConfigError(
                f"reward_func: {self.framework} calls {self._reward.name} with data_source, "
                "solution_str, ground_truth and extra_info; make it accept these"
            )

    def train(self) -> Path:
        """Run the framework, and return `output_path`."""
        self._run()
        return self.output_path

    def _load_settings(self, config: Any) -> dict[str, Any]:
        """Return the framework's settings, without those of this engine."""
        settings = nested(load_settings(config))
        refuse_settings_of(settings, self.package)
        python_key = f"{self.package}_python"
        given = settings.pop(python_key, None)
        python = given if given is not None else os.environ.get(self._python_variable)
        self._python = sys.executable if python is None else checked_program(python_key, python)
        self._processes = settings.pop("agent_processes", None)
        return settings

    def _write_agent(self, module_name: str, text: str, reward: RewardFunction | None) -> None:
        """Write the module that the framework imports, and the agent next to it."""
        assert self._description is not None, "the agent is checked first"
        settings = worker_settings(self._description, self._processes, reward)
        write_worker_settings(settings, self.run_path / "agent_workers.json")
        (self.run_path / f"{module_name}.py").write_text(text, encoding="utf-8")

    def _write_config(self, settings: dict[str, Any]) -> None:
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        self.config_path.write_text(text, encoding="utf-8")

    @property
    def _python_variable(self) -> str:
        return f"AGENTRL_{self.package.upper()}_PYTHON"

    def _module_name(self, suffix: str) -> str:
        assert self._description is not None, "the agent is checked first"
        name = re.sub(r"\W+", "_", self._description.name, flags=re.ASCII).strip("_").lower()
        return f"{name or 'agent'}_{suffix}"

    def _run(self, *overrides: str) -> None:
        """Run the framework to its end."""
        assert self._description is not None, "AgentTrainer checks before it trains"
        environment = os.environ | self.environment
        if not has_package(self._python, self.package, environment):
            raise ConfigError(
                f"train_engine_name: {self.framework} is not installed for {self._python}; create "
                f"an environment with scripts/setup_agents {self.package} FOLDER, and set "
                f"{self._python_variable} to its Python"
            )
        check_can_run(self._description)
        command = [*self.command, *overrides]
        status = run_to_end(command, environment)
        if status != 0:
            raise AgentRLError(f"{self.framework} exited with status {status}; see its output")
