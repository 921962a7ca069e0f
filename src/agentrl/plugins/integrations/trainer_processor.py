"""`TrainerProcessor`: the interface between a training engine and `AgentTrainer`."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError


class TrainerProcessor(ABC):
    """A training engine: takes an agent, data, a reward and a configuration, and trains.

    `AgentTrainer` creates one with the run's folder, passes the four arguments to the `check_`
    methods (agent, dataset, reward, config, in that order) and marks it initialized. A `check_`
    method takes an argument as the user gave it (an object, a path, or None) and stores what
    `train` will need. For an unusable argument it raises `ConfigError` with the argument's name and
    a remedy. Nothing is started before `train`.

    Attributes:
        run_path: existing folder of the run, for the engine's generated files.
    """

    def __init__(self, run_path: str | Path) -> None:
        self.run_path = Path(run_path)
        self._initialized = False

    @property
    def initialized(self) -> bool:
        """Whether all four arguments passed their checks."""
        return self._initialized

    def mark_initialized(self) -> None:
        """Allow `train`; `AgentTrainer` calls this after the last check."""
        self._initialized = True

    @abstractmethod
    def check_agent(self, agent: Any) -> None:
        """Accept the agent: an object, or the path of a description.

        Raises:
            ConfigError: this engine cannot run it.
        """

    def check_environment(self, env: str) -> None:
        """Accept an environment, which provides agent, training data and reward.

        Raises:
            ConfigError: it does not exist, or this engine supports no environments.
        """
        raise ConfigError(
            f"env: {type(self).__name__} does not support environments; use "
            "train_engine_name='agentrl'"
        )

    @abstractmethod
    def check_dataset(self, dataset: Any, test_dataset: Any = None) -> None:
        """Accept the questions: objects or paths; None if the configuration names them.

        Raises:
            ConfigError: one of them is missing, malformed or empty.
        """

    @abstractmethod
    def check_reward(self, reward_func: Any) -> None:
        """Accept the reward: a function, or `file.py:function`; None leaves it to the data.

        Raises:
            ConfigError: it cannot be found or called.
        """

    @abstractmethod
    def check_config(self, config: Any) -> Any:
        """Accept the configuration and return it complete: loaded, defaults filled in, checked.

        Raises:
            ConfigError: it cannot be read, or contains an invalid value.
        """

    @abstractmethod
    def train(self) -> Any:
        """Train, and return when training is over.

        Raises:
            AgentRLError: training failed.
        """

    def inference(self, dataset: Any = None) -> Any:
        """Evaluate the trained agent on questions, and return the scores; may be a coroutine.

        Args:
            dataset: the questions; None means the test data.

        Raises:
            ConfigError: the engine does not implement it.
            AgentRLError: there are no questions, or the evaluation failed.
        """
        raise ConfigError(
            f"train_engine_name: {type(self).__name__} supports training only; it has no "
            "`inference(dataset)`"
        )
