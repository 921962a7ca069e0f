"""The losses that a loop names in place of `--loss_calculator`: checked, tried, and kept with the run."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentrl.config.loading import build_config, flat_values
from agentrl.config.own_function import with_sources
from agentrl.config.sections import AlgorithmSection, RootConfig
from agentrl.errors import ConfigError
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore
from agentrl.trainer.bootstrap import WorkerGroup


class NamedLosses:
    """The flags of a run under the loss that its loop named last."""

    def __init__(self, config: RootConfig, store: TrajectoryStore, group: WorkerGroup) -> None:
        """Start with the loss of the flags."""
        self._flags = config
        self._current = config
        self._store = store
        self._group = group

    async def algorithm(
        self, loss: str | Callable[..., Any] | None, arguments: Mapping[str, Any], *, last_step: int
    ) -> AlgorithmSection:
        """Return the flags of the algorithm with a loss.

        Args:
            loss: as `--loss_calculator`, or a function of a file; None: that of the flags.
            arguments: as `--loss_args`.
            last_step: the last step before this loss.
        """
        config = self._flags
        if loss is not None:
            values = {"loss_calculator": reference_of(loss), "loss_args": dict(arguments) or None}
            config = build_config({**flat_values(config), **values})
        if config.algorithm != self._current.algorithm:
            problem = await self._group.problem_of_functions(config)
            if problem is not None:
                raise ConfigError(problem)
            if config.trainer.consumer == DEFAULT_CONSUMER:
                await self._store.runs.set_config(with_sources(flat_values(config)), last_step)
            self._current = config
        return config.algorithm


def reference_of(loss: str | Callable[..., Any]) -> str:
    """Return the name of a loss, by which every rank and `agentrl replay` find it."""
    if isinstance(loss, str):
        return loss
    path, name = inspect.getsourcefile(loss), loss.__qualname__
    if path is None or not name.isidentifier() or not Path(path).is_file():
        raise ConfigError(
            f"forward_backward: the loss {loss.__name__} is not defined at the top of a file, from which the "
            "other ranks and `agentrl replay` could import it; define it with def in a .py file"
        )
    return f"{path}:{name}"
