"""`agentrl tasks`: the questions of a run."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING

import click

from agentrl.cli.databases import served_uri
from agentrl.config.command_line import FlagGroup
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.runtime.printable import counted, one_line

if TYPE_CHECKING:
    from agentrl.schema import Split, Task
    from agentrl.store import TrajectoryStore

_SPLITS: tuple["Split", ...] = ("train", "eval", "test", "valid")


def _splits(ctx: click.Context, param: click.Parameter, split: "Split | None") -> "Sequence[Split]":
    return _SPLITS if split is None else (split,)


_split_argument = click.argument(
    "splits",
    metavar=f"[{'|'.join(_SPLITS)}]",
    required=False,
    type=click.Choice(_SPLITS),
    callback=_splits,
)


@click.group("tasks", cls=FlagGroup, sections=("run", "store", "data", "rollout"))
def tasks() -> None:
    """Add questions to a run, list or count its questions, or retry failed ones."""


@tasks.command("add")
async def add(config: RootConfig) -> int:
    """Add those questions of --train_file, or tasks of --env, that the run does not have yet."""
    from agentrl.datasets.task_stream import append_tasks, train_tasks
    from agentrl.launcher.checks.first_question import first_question_lines
    from agentrl.rewards import MCPScorerFactory, load_scorer_module
    from agentrl.store import TrajectoryStore

    if config.data.train_file is None and config.data.env is None:
        raise ConfigError("`agentrl tasks add` needs --train_file, or --env")
    if config.rollout.scorer_module is not None:
        load_scorer_module(config.rollout.scorer_module)
    questions = train_tasks(config.data, config.run.seed, MCPScorerFactory.check_question)
    # Reports a mistake in the file before a database is created for it.
    first = list(islice(questions, 1))
    for line in first_question_lines(config, config.data.train_file):
        print(line)
    with served_uri(config, create=True) as uri:
        async with TrajectoryStore.connect(uri, config.run.run_name) as store:
            await store.ensure_schema()
            num_new, num_known = await append_tasks(store, chain(first, questions))
            await store.audit.add("add tasks", {"num_new": num_new})
            print(f"{num_new} new tasks in {store.database_name!r}; {num_known} existed already")
    return 0


@tasks.command("list")
@_split_argument
async def list_tasks(config: RootConfig, splits: "Sequence[Split]") -> int:
    """Print one line per task: status, mean score, and the status of its rollouts."""
    async with _store_with_tasks(config) as store:
        for split in splits:
            async for task in store.tasks.find(split=split):
                print(one_line(await _task_line(store, task)))
    return 0


@tasks.command("retry")
@_split_argument
async def retry(config: RootConfig, splits: "Sequence[Split]") -> int:
    """Retry questions with failed rollouts."""
    from agentrl.datasets.task_stream import retry_dead_letters

    async with _store_with_tasks(config) as store:
        num_added = sum([await retry_dead_letters(store, split) for split in splits])
        await store.audit.add("retry", {"splits": list(splits), "num_added": num_added})
        print(f"retrying {counted(num_added, 'question')}")
    return 0


@tasks.command("stats")
@_split_argument
async def stats(config: RootConfig, splits: "Sequence[Split]") -> int:
    """Print the number of tasks and rollouts and the mean score of each split."""
    async with _store_with_tasks(config) as store:
        counts = await store.reports.by_split()
        for split in splits:
            if split in counts:
                found = counts[split]
                mean = "-" if found.mean_score is None else f"{found.mean_score:.3f}"
                print(
                    f"{split:6} {found.num_completed} of {found.num_groups} tasks completed; "
                    f"rollouts: {found.num_scored} scored (mean {mean}), {found.num_failed} failed"
                )
    return 0


@asynccontextmanager
async def _store_with_tasks(config: RootConfig) -> "AsyncIterator[TrajectoryStore]":
    """Yield the store of a run that has tasks."""
    from agentrl.datasets.task_source import load_sampler_module
    from agentrl.store import TrajectoryStore

    load_sampler_module(config.data)
    with served_uri(config) as uri:
        async with TrajectoryStore.connect(uri, config.run.run_name) as store:
            if not await store.tasks.count():
                known = await store.reports.run_names()
                hint = f"; existing: {', '.join(known)}" if known else ""
                raise ConfigError(f"{store.redacted_uri} contains no tasks (--run_name){hint}")
            yield store


async def _task_line(store: "TrajectoryStore", task: "Task") -> str:
    records = await store.records.of_task(task.id)
    counts = Counter(record.status for record in records)
    scores = [record.score.value for record in records if record.score is not None]
    mean = f"{sum(scores) / len(scores):.3f}" if scores else "-"
    rollouts = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return f"{task.id}  {task.status}  score {mean}  {rollouts}"
