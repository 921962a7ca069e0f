"""Tasks that are in no file: the interface of a plugin's `task_sources`, and `--sampler_module`.

`--env KIND:NAME` and `--eval_env` name a source by its KIND; the rest of the text is the source's own. A
sampler module, a Python file of the user, registers kinds of tasks and samplers, and may yield tasks.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from difflib import get_close_matches
from types import ModuleType
from typing import Any, Protocol

from agentrl.config.sections import DataSection
from agentrl.config.user_code import load_user_module
from agentrl.errors import ConfigError
from agentrl.plugin_registry import hooks, loaded_hook
from agentrl.schema import MCPTask, Split, Task

_FUNCTION = "train_tasks"


class TaskSource(Protocol):
    """One KIND of `--env`."""

    @property
    def starts_programs(self) -> bool:
        """Whether its rollouts start their own programs, on the cores of the sampler's machine."""

    def can_branch(self, uri: str, flag: str) -> bool:
        """Return whether a rollout of `uri`, given as `flag`, can start at a turn of another.

        Raises:
            ConfigError: `uri` is malformed.
        """

    def num_tasks(self, uri: str, config: DataSection, flag: str) -> int:
        """Return the number of tasks that `uri`, given as `flag`, has.

        Raises:
            ConfigError: it does not exist, or is not installed.
        """

    def tasks(
        self, uri: str, config: DataSection, split: Split, *, seed: int, **stream: Any
    ) -> Iterator[MCPTask]:
        """Yield the tasks of `uri` over all epochs.

        Args:
            uri: the text of the flag.
            config: settings of the tasks.
            split: split of the tasks.
            seed: of sources whose tasks are drawn, unless the text names one.
            **stream: see `agentrl.datasets.task_stream.tasks_from_questions`.

        Raises:
            ConfigError: it does not exist, or is not installed.
            DatasetError: one of its tasks cannot be stored.
        """

    def samplers(self, config: DataSection, endpoints: Any) -> AbstractContextManager[Any]:
        """Open what plays the tasks in a sampler process: a `MakeSampler` until the block ends.

        Args:
            config: settings of the tasks.
            endpoints: the policy's `AgentEndpointServer`.
        """


def task_source(uri: str, flag: str = "--env") -> TaskSource:
    """Return the source that a text names."""
    kind = uri.partition(":")[0]
    source: TaskSource | None = loaded_hook("task_sources", kind)
    if source is None:
        known = hooks("task_sources")
        near = get_close_matches(kind, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{flag} {uri}: unknown kind {kind!r}{hint} (known: {', '.join(known)}); write KIND:NAME"
        )
    return source


def load_sampler_module(config: DataSection) -> ModuleType | None:
    """Import the file that registers kinds of tasks, so that the store can read them."""
    source = config.sampler_module
    return None if source is None else load_user_module(source, f"--sampler_module {source}")


def generated_tasks(config: DataSection, seed: int) -> Iterator[Task]:
    """Import `--sampler_module` immediately, and yield its training tasks, if any."""
    return _tasks_of(load_sampler_module(config), config, seed)


def _tasks_of(module: ModuleType | None, config: DataSection, seed: int) -> Iterator[Task]:
    generator = getattr(module, _FUNCTION, None)
    if generator is None:
        return
    what = f"--sampler_module {config.sampler_module}: {_FUNCTION}"
    for task in _call_generator(generator, seed, what):
        if not isinstance(task, Task):
            raise ConfigError(f"{what} yielded a {type(task).__name__}, not a task")
        fields: dict[str, object] = {"split": "train"}
        if "num_generations" not in task.model_fields_set:
            fields["num_generations"] = config.num_generations
            fields["rounds"] = config.rounds
        yield task.model_copy(update=fields)


def _call_generator(generator: object, seed: int, what: str) -> Iterator[object]:
    try:
        yield from generator(seed)  # type: ignore[operator]
    except Exception as error:
        raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error
