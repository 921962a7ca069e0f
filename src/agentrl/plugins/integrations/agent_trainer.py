"""`AgentTrainer`: from an agent, data, a reward and a configuration to a training run."""

import asyncio
import inspect
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

from agentrl.config.flags import SETTINGS, canonical_name
from agentrl.errors import ConfigError
from agentrl.plugin_registry import hooks, loaded_hook
from agentrl.plugins.integrations.agent_worker.references import described
from agentrl.plugins.integrations.one_line_errors import one_line_errors
from agentrl.plugins.integrations.trainer_processor import TrainerProcessor

log = logging.getLogger(__name__)


class AgentTrainer:
    """Trains an agent with the engine of your choice.

    Everything is checked here, in this order: agent, dataset, reward function, configuration.
    Nothing starts before `train`.

    Example:
        trainer = AgentTrainer(agent, reward_func=my_reward, train_dataset="questions.jsonl")
        trainer.train()
        print(trainer.evaluate("held_out.jsonl"))

    Attributes:
        train_processor: the engine.
        config: the configuration as the engine completed it.
        run_path: folder of the run.
    """

    _registered: ClassVar[dict[str, type[TrainerProcessor]]] = {}

    @one_line_errors()
    def __init__(
        self,
        agent: Any = None,
        config: Any = None,
        reward_func: Any = None,
        train_dataset: Any = None,
        test_dataset: Any = None,
        run_path: str | Path | None = None,
        train_engine_name: str = "agentrl",
        env: str | None = None,
        **others: Any,
    ) -> None:
        """Check everything.

        Args:
            agent: an AWorld `Agent` or `Swarm`, a function `async (task, endpoint) -> answer`,
                a class with `build_agents()`, or the path of any of them: an agent's YAML file, or
                `file.py:name`.
            config: a mapping, an object, JSON text, or the path of a YAML or JSON file. Its keys
                are the engine's.
            reward_func: a function, or `file.py:function`; by default the dataset specifies the
                scoring.
            train_dataset: a csv, json, jsonl or parquet file, a Hugging Face `Dataset`, or a list
                of rows.
            test_dataset: held-out questions, in the same forms.
            run_path: folder of the run, created if missing; by default `runs` in the working
                directory.
            train_engine_name: `agentrl`, `areal`, `sft`, `trl`, `verl`, or a registered one.
            env: an environment, as in `reasoning_gym:NAME?size=200`, in place of `agent`,
                `train_dataset` and `reward_func`, all of which it provides.
            others: refused, with the place of what was meant.

        Raises:
            ConfigError: an argument is invalid; the message names it and the remedy.
        """
        for name in others:
            meant = (
                f'config={{"{canonical_name(name)}": ...}}'
                if canonical_name(name) in SETTINGS
                else ""
            )
            meant = "reward_func=, one function" if name == "reward_funcs" else meant
            hint = f"pass {meant}" if meant else "flags go into config={...}"
            raise ConfigError(f"{name}: no argument of AgentTrainer; {hint}")
        arguments = {"agent": agent, "train_dataset": train_dataset, "reward_func": reward_func}
        given = [name for name, value in arguments.items() if value is not None]
        if env is not None and given:
            raise ConfigError(f"env: {env} provides its own {given[0]}; remove {given[0]}")
        if env is None and (agent is None or agent == ""):
            raise ConfigError(
                "agent: missing; pass an agent object, a function, the path of one, or an env"
            )
        engine_class = self._engine_class(str(train_engine_name))
        self.run_path = _create_folder("runs" if run_path is None else run_path)
        missing = ", ".join(sorted(getattr(engine_class, "__abstractmethods__", ())))
        if missing:
            raise ConfigError(
                f"train_engine_name: {train_engine_name!r}: {engine_class.__name__} has no {missing}; "
                "define every abstract method of TrainerProcessor"
            )
        processor = engine_class(self.run_path)
        if not isinstance(processor, TrainerProcessor):
            raise ConfigError(
                f"train_engine_name: {train_engine_name!r} creates a {type(processor).__name__}; "
                "an engine must derive from agentrl.integrations.TrainerProcessor"
            )
        self.train_processor = processor
        if env is None:
            processor.check_agent(agent)
        else:
            processor.check_environment(str(env))
        processor.check_dataset(train_dataset, test_dataset)
        processor.check_reward(reward_func)
        self.config = processor.check_config(config)
        processor.mark_initialized()
        log.info("engine %s is ready in %s", train_engine_name, self.run_path)

    @one_line_errors()
    def train(self) -> Any:
        """Train to completion, and return the engine's result.

        Raises:
            ConfigError: the engine was not initialized.
            AgentRLError: training failed.
        """
        return self._ready().train()

    async def inference(self, dataset: Any = None) -> Any:
        """Evaluate the trained agent on `dataset` or the test data, and return the scores.

        Raises:
            AgentRLError: there are no questions, or the evaluation failed.
        """
        with one_line_errors():
            processor = self._ready()
            if inspect.iscoroutinefunction(processor.inference):
                return await processor.inference(dataset)
            return await asyncio.to_thread(processor.inference, dataset)

    @one_line_errors()
    def evaluate(self, dataset: Any = None) -> Any:
        """Call `inference` from synchronous code, including notebooks."""
        with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has an event loop already
            return thread.submit(asyncio.run, self.inference(dataset)).result()

    @classmethod
    def register_processor(cls, train_engine_name: str, train_type: type[TrainerProcessor]) -> None:
        """Register a custom engine under a name.

        Raises:
            ConfigError: the name is taken, or the class is not a `TrainerProcessor`.
        """
        if train_engine_name in cls.engine_names():
            raise ConfigError(
                f"train_engine_name: {train_engine_name!r} is already registered; choose another "
                "name, or call unregister_processor first"
            )
        if not issubclass(train_type, TrainerProcessor):
            raise ConfigError(
                f"train_type: {train_type!r} does not derive from agentrl.integrations.TrainerProcessor"
            )
        cls._registered[train_engine_name] = train_type

    @classmethod
    def unregister_processor(cls, train_engine_name: str) -> None:
        """Remove a registered engine, if the name exists."""
        cls._registered.pop(train_engine_name, None)

    @classmethod
    def engine_names(cls) -> list[str]:
        """Return the names of all engines, sorted."""
        return sorted({*hooks("training_engines"), *cls._registered})

    @classmethod
    def _engine_class(cls, name: str) -> Any:
        if name in cls._registered:
            return cls._registered[name]
        found = loaded_hook("training_engines", name)
        if found is not None:
            return found
        near = get_close_matches(name, cls.engine_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"train_engine_name: unknown engine {name!r}{hint} (known: "
            f"{', '.join(cls.engine_names())}; add one with register_processor)"
        )

    def _ready(self) -> TrainerProcessor:
        if not self.train_processor.initialized:
            raise ConfigError("train_processor: it is not initialized; create a new AgentTrainer")
        return self.train_processor


def _create_folder(run_path: object) -> Path:
    if not isinstance(run_path, str | os.PathLike):
        raise ConfigError(f"run_path: {described(run_path)} is not the path of a folder")
    path = Path(run_path).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a null character
        reason = getattr(error, "strerror", error)
        raise ConfigError(
            f"run_path: {path} cannot be created ({reason}); give another folder"
        ) from None
    return path
