"""`agentrl tasks add|list|retry|stats`."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile

from agentrl.cli.uri import store_uri
from agentrl.config.loading import parse_flags
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError, StoreError
from agentrl.schema import Split, Task
from agentrl.store import TrajectoryStore

SPLITS: tuple[Split, ...] = ("train", "eval", "test", "valid")


def main(argv: Sequence[str]) -> int:
    """Add questions to a run, list or count what it has, or ask again what had failed."""
    words = list(takewhile(lambda word: not word.startswith("--"), argv[:2]))
    action, wanted = (*words, "", "")[:2]
    config = parse_flags(argv[len(words) :])
    if action not in _ACTIONS or (action == "add" and wanted):
        raise ConfigError(
            "say `agentrl tasks add --train_file FILE ...`, or `agentrl tasks list|retry|stats "
            f"[{'|'.join(SPLITS)}] ...`"
        )
    splits = tuple(split for split in SPLITS if wanted in ("", split))
    if not splits:
        raise ConfigError(f"unknown split {wanted!r}; one of {', '.join(SPLITS)}")
    return asyncio.run(_with_store(config, splits, _ACTIONS[action]))


async def _with_store(config: RootConfig, splits: Sequence[Split], action: "_Action") -> int:
    async with TrajectoryStore.connect(store_uri(config), config.run.run_name) as store:
        if action is not _add and not await store.tasks.count():
            known = await store.reports.run_names()
            hint = f"; there are {', '.join(known)}" if known else ""
            raise StoreError(f"{store.redacted_uri} holds no tasks (--run_name){hint}")
        await action(config, store, splits)
    return 0


async def _add(config: RootConfig, store: TrajectoryStore, splits: Sequence[Split]) -> None:
    from agentrl.datasets.task_stream import append_tasks, train_tasks
    from agentrl.rewards import MCPScorerFactory, load_scorer_module

    if config.data.train_file is None:
        raise ConfigError("`agentrl tasks add` needs --train_file")
    if config.rollout.scorer_module is not None:
        load_scorer_module(config.rollout.scorer_module)
    await store.ensure_schema()
    tasks = train_tasks(config.data, config.run.seed, MCPScorerFactory.check_question)
    num_new, num_known = await append_tasks(store, tasks)
    print(f"{num_new} new tasks in {store.database_name!r}, {num_known} were there before")


async def _list(config: RootConfig, store: TrajectoryStore, splits: Sequence[Split]) -> None:
    for split in splits:
        async for task in store.tasks.find(split=split):
            print(await _line(store, task))


async def _line(store: TrajectoryStore, task: Task) -> str:
    records = await store.records.of_task(task.id)
    counts = Counter(record.status for record in records)
    scores = [record.score.value for record in records if record.score is not None]
    mean = f"{sum(scores) / len(scores):.3f}" if scores else "-"
    tries = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return f"{task.id}  {task.status}  score {mean}  {tries}"


async def _retry(config: RootConfig, store: TrajectoryStore, splits: Sequence[Split]) -> None:
    from agentrl.datasets.task_stream import retry_dead_letters

    num_added = sum([await retry_dead_letters(store, split) for split in splits])
    print(f"{num_added} questions are asked again")


async def _stats(config: RootConfig, store: TrajectoryStore, splits: Sequence[Split]) -> None:
    for split in splits:
        total = await store.tasks.count(split=split)
        if not total:
            continue
        completed = await store.tasks.count(split=split, status="completed")
        num_failed, num_scored, score = 0, 0, 0.0
        async for record in store.records.find(split=split):
            num_failed += record.status == "failed"
            if record.score is not None:
                num_scored += 1
                score += record.score.value
        mean = f"{score / num_scored:.3f}" if num_scored else "-"
        print(
            f"{split:6} {completed} of {total} tasks completed, "
            f"mean score {mean} over {num_scored} tries, {num_failed} tries dead-lettered"
        )


_Action = Callable[[RootConfig, TrajectoryStore, Sequence[Split]], Awaitable[None]]
_ACTIONS: dict[str, _Action] = {"add": _add, "list": _list, "retry": _retry, "stats": _stats}
