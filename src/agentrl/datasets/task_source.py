"""Sources of tasks other than files: the interface of a plugin's `task_sources`.

`--env KIND:NAME` and `--eval_env` name a source by its KIND; the rest of the text is the source's own.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from difflib import get_close_matches
from typing import Any, Protocol

from agentrl.config.sections import DataSection
from agentrl.errors import ConfigError
from agentrl.plugin_registry import hooks, loaded_hook
from agentrl.schema import MCPTask, Split


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
    """Return the source that a text names.

    Raises:
        ConfigError: no plugin has its KIND.
    """
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
