"""The engine `agentrl`: a run of this project, all processes on this machine.

The agent is described in `agent_workers.json` and run by workers in the interpreter of this
process; training runs in an interpreter with torch, which may be a different one.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

from agentrl.config.loading import build_config, secret_environment, write_config
from agentrl.config.sections import RootConfig
from agentrl.config.validation.algorithm_checks import check_training
from agentrl.errors import AgentRLError, ConfigError
from agentrl.plugins.environments import EnvironmentUri
from agentrl.plugins.integrations.agent_worker.describe import describe
from agentrl.plugins.integrations.agent_worker.description import (
    AgentDescription,
    check_can_run,
    worker_settings,
    write_agent,
)
from agentrl.plugins.integrations.engine_settings import (
    checked_program,
    has_package,
    load_settings,
    refuse_settings_of,
)
from agentrl.plugins.integrations.question_rows import (
    SCORER,
    rewrite_questions,
    scored_by,
    warn_of_equal_files,
    write_questions,
)
from agentrl.plugins.integrations.reward_functions import RewardFunction, check_reward_function
from agentrl.plugins.integrations.trainer_processor import TrainerProcessor
from agentrl.runtime.http.proxies import direct_to_this_machine
from agentrl.runtime.processes.child_processes import run_to_end

PYTHON_VARIABLE = "AGENTRL_PYTHON"
_OWN_KEYS = ("agent_processes", "training_python")


class NativeEngine(TrainerProcessor):
    """Samplers, store and trainer of this project.

    The configuration's keys are the flags of `agentrl run`, and:
        agent_processes: worker processes of one sampler (1 for a function; 4 for AWorld's
            agents, which run one rollout at a time in each).
        training_python: an interpreter with `agentrl-mongo[train,engine]`, if this one lacks it;
            by default the environment variable AGENTRL_PYTHON.
    """

    trains_by_itself: ClassVar[bool] = True
    """Whether AgentRL's trainer computes, which requires a known model and a valid mesh."""

    def __init__(self, run_path: str | Path) -> None:
        super().__init__(run_path)
        self._description: AgentDescription | None = None
        self._env: str | None = None
        self._reward: RewardFunction | None = None
        self._files: dict[str, Path] = {}
        self._config: RootConfig | None = None
        self._python = sys.executable

    @property
    def config_path(self) -> Path:
        """The flags of the run, for manual `agentrl` commands."""
        return self.run_path / "run.yaml"

    def check_agent(self, agent: Any) -> None:
        """Describe the agent (see `describe`); its secrets go into this process's environment."""
        self._description, secrets = describe(agent, self.run_path)
        os.environ.update(secrets)

    def check_environment(self, env: str) -> None:
        """Store the environment; `agentrl run` checks whether its package has it."""
        EnvironmentUri.parse(env, "env:")
        self._env = env

    def check_dataset(self, dataset: Any, test_dataset: Any = None) -> None:
        """Write the questions to `train_data.jsonl` and `test_data.jsonl`."""
        given = {"train_dataset": dataset, "test_dataset": test_dataset}
        for argument, value in given.items():
            if value is not None:
                path = self.run_path / argument.replace("dataset", "data.jsonl")
                self._write_data(value, path, argument)
                self._files[argument] = path
        if len(self._files) == 2:
            warn_of_equal_files(*self._files.values())

    def check_reward(self, reward_func: Any) -> None:
        """Find the reward function, and let it score every question."""
        if reward_func is None:
            return
        questions = next(iter(self._files.values()), None)
        self._reward = check_reward_function(reward_func, self.run_path, questions)
        for path in self._files.values():
            rewrite_questions(path, scored_by(SCORER, self._reward.form))

    def check_config(self, config: Any) -> RootConfig:
        """Add flags that follow from the other arguments, check all, and write the run's files."""
        settings = load_settings(config)
        refuse_settings_of(settings, "agentrl")
        engine_settings = {key: settings.pop(key) for key in _OWN_KEYS if key in settings}
        self._python = _training_python(engine_settings.get("training_python"))
        settings.setdefault("run_name", "agent")
        settings.setdefault("output_dir", self.run_path / "output")
        settings.setdefault("logs_dir", self.run_path / "logs")
        settings.setdefault("mongo_data_dir", self.run_path / "mongo")
        if self._env is None:
            settings["agent"] = f"{self._agent_module}:run_agent"
        else:
            settings["env"] = self._env
        for flag, argument in (("train_file", "train_dataset"), ("eval_file", "test_dataset")):
            if argument in self._files and not settings.get(flag):
                settings[flag] = self._files[argument]
        if self._reward is not None:
            if settings.get("scorer_module"):
                raise ConfigError("config: scorer_module and reward_func are mutually exclusive")
            settings["scorer_module"] = self._agent_module
            settings["default_scorer"] = SCORER
        try:
            self._config = build_config(settings)
            if self._config.data.has_training:
                check_training(self._config)
        except ConfigError as error:
            raise ConfigError(f"config: {str(error).removeprefix('--')}") from None
        write_config(self._config, self.config_path)
        self._check_policy(self._config)
        if not self._config.data.has_training and not self._config.data.has_held_out:
            raise ConfigError("train_dataset: missing; pass it, or `train_file` in the config")
        if self._description is not None:
            self._write_agent(self._description, engine_settings.get("agent_processes"))
        return self._config

    def _write_data(self, dataset: Any, path: Path, argument: str) -> None:
        """Write a dataset in the format that training reads."""
        write_questions(dataset, path, argument)

    def _check_policy(self, config: RootConfig) -> None:
        """Reject a model that is missing or cannot be trained on these ranks.

        The agents' interpreter may lack the packages that read models; the command in
        `training_python` then checks the model before it starts anything.
        """
        if self._python == sys.executable:
            from agentrl.launcher.checks.policy_checks import (  # noqa: PLC0415 - has its own packages
                check_policy,
            )

            check_policy(config, trains=self.trains_by_itself)
        elif not has_package(self._python, "agentrl", os.environ):
            raise ConfigError(
                f"training_python: {self._python} has no AgentRL; install it with {self._python} -m "
                "pip install 'agentrl-mongo[train,engine]'"
            )

    def train(self) -> dict[str, Any]:
        """Run `agentrl run`, and return the content of its `summary.json`."""
        config = self._checked_config()
        if not config.data.has_training:
            raise ConfigError("train_dataset: missing; pass it to AgentTrainer")
        # These flags apply to this start only, so they are not written to a file.
        start_flags = [
            f"--{name}" for name in ("fresh", "delete_existing") if getattr(config.run, name)
        ]
        self._run(*self._training_command(), *start_flags)
        summary: dict[str, Any] = json.loads(
            (config.run.output_path / "summary.json").read_text(encoding="utf-8")
        )
        return summary

    def inference(self, dataset: Any = None) -> dict[str, Any]:
        """Run `agentrl eval` on the newest checkpoint, or on the model before training."""
        config = self._checked_config()
        path = config.data.eval_file
        if dataset is not None and self._env is not None:
            raise ConfigError(
                "dataset: an environment provides its own tasks; give `eval_env` instead"
            )
        if dataset is not None:
            path = self.run_path / "inference_data.jsonl"
            write_questions(dataset, path, "dataset")
            if self._reward is not None:
                rewrite_questions(path, scored_by(SCORER, self._reward.form))
        if path is None and config.data.eval_env is None:
            raise ConfigError("dataset: missing; pass it here, or test_dataset before")
        flags = [] if path is None else ["--eval_file", str(path)]
        if not list((config.run.output_path / "checkpoints").glob("*/model/config.json")):
            flags += ["--model_name_or_path", config.model.model_name_or_path]
        self._run("agentrl", "eval", *flags)
        result: dict[str, Any] = json.loads(
            (config.run.output_path / "eval.json").read_text(encoding="utf-8")
        )
        return result

    def _checked_config(self) -> RootConfig:
        assert self._config is not None, "AgentTrainer checks before it trains"
        return self._config

    def _training_command(self) -> list[str]:
        """Return the module that trains, and its arguments before the flags."""
        return ["agentrl", "run"]

    def _run(self, module: str, command: str, *flags: str) -> None:
        if self._description is not None:
            check_can_run(self._description)
        argv = [self._python, "-m", module, command, "--config", str(self.config_path), *flags]
        config = self._checked_config()
        environment = {
            "AWORLD_LOG_PATH": str(config.run.logs_dir / "aworld"),
            **os.environ,
            **direct_to_this_machine(os.environ),
            **secret_environment(config),
        }
        status = run_to_end(argv, environment)
        if status != 0:
            raise AgentRLError(f"`{module} {command}` exited with status {status}; see its output")

    @property
    def _agent_module(self) -> Path:
        return self.run_path / "worker_agent.py"

    def _write_agent(self, description: AgentDescription, processes: object) -> None:
        settings = worker_settings(description, processes, self._reward)
        write_agent(settings, self._agent_module)


def _training_python(given: Any) -> str:
    """Return the interpreter that trains."""
    if given is not None or os.environ.get(PYTHON_VARIABLE):
        return checked_program(
            "training_python", os.environ[PYTHON_VARIABLE] if given is None else given
        )
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "config: this Python has no torch; set AGENTRL_PYTHON (or training_python) to the "
            "Python of an environment with agentrl-mongo[train,engine]"
        )
    return sys.executable
