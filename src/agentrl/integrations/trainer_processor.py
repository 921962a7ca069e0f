"""`TrainerProcessor`: what a training engine is to `AgentTrainer`."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError


class TrainerProcessor(ABC):
    """A training engine: takes an agent, data, a reward and a configuration, and trains.

    `AgentTrainer` makes one with the run's folder, hands it the four arguments through the `check_`
    methods (agent, dataset, reward, config, in that order) and marks it initialised. A `check_`
    method takes an argument as the user gave it (an object, a path, or None), keeps what `train`
    will need, and raises `ConfigError` with the name of the argument and a remedy where it cannot
    be used. Nothing is started before `train`.

    Attributes:
        run_path: folder of the run; it exists. What the engine generates goes there.
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
        """Take the agent: an object, or the path of a description.

        Raises:
            ConfigError: it is no agent that this engine can run.
        """

    def check_environment(self, env: str) -> None:
        """Take an environment, which brings agent, training data and reward.

        Raises:
            ConfigError: it does not exist, or this engine takes none.
        """
        raise ConfigError(
            f"env: {type(self).__name__} does not support environments; use "
            "train_engine_name='agentrl'"
        )

    @abstractmethod
    def check_dataset(self, dataset: Any, test_dataset: Any = None) -> None:
        """Take the questions: objects or paths; None where the configuration names them.

        Raises:
            ConfigError: one of them is missing, malformed or empty.
        """

    @abstractmethod
    def check_reward(self, reward_func: Any) -> None:
        """Take the reward: a function, or `file.py:function`; None leaves it to the data.

        Raises:
            ConfigError: it cannot be found or called.
        """

    @abstractmethod
    def check_config(self, config: Any) -> Any:
        """Take the configuration and return it complete: loaded, defaults filled in, checked.

        Raises:
            ConfigError: it cannot be read, or a value in it is impossible.
        """

    @abstractmethod
    def train(self) -> Any:
        """Train, and return when training is over.

        Raises:
            AgentRLError: training failed.
        """

    def inference(self, dataset: Any = None) -> Any:
        """Let the trained agent answer questions, and return the scores; may be a coroutine.

        Args:
            dataset: the questions; None means the test data.

        Raises:
            ConfigError: the engine has no method of its own.
            AgentRLError: there is nothing to ask, or it failed.
        """
        raise ConfigError(
            f"train_engine_name: {type(self).__name__} supports training only; it has no "
            "`inference(dataset)`"
        )
