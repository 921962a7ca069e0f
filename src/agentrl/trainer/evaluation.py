"""Held-out questions, played by the samplers under one policy version."""

import asyncio
import logging
import time
from collections.abc import Sequence

from agentrl.errors import StoreError
from agentrl.schema import Task
from agentrl.store import TrajectoryStore
from agentrl.trainer.history import EvalMetrics

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25


async def evaluate(
    store: TrajectoryStore,
    tasks: Sequence[Task],
    *,
    version: int,
    reuse: bool,
    timeout_seconds: float,
    stop: asyncio.Event,
) -> EvalMetrics | None:
    """Have `tasks` played and return their mean score; None when `stop` came first.

    The tasks overtake all training tasks. No new version may be published meanwhile.

    Args:
        store: the run's store.
        tasks: evaluation questions.
        version: policy version that the servers serve.
        reuse: go on with tasks that an earlier process pushed for this version.
        timeout_seconds: longest wait for the scores.
        stop: set when the process has to end.

    Raises:
        StoreError: the scores did not arrive in time; the text says what is missing.
    """
    started = time.monotonic()
    tag = await _free_tag(store, version, reuse=reuse)
    await store.add_tasks(_as_evaluation(tasks, tag))
    while (num_done := await store.count_tasks(tag=tag, status="completed")) < len(tasks):
        if time.monotonic() - started > timeout_seconds:
            raise StoreError(await _what_is_missing(store, tag, num_done, len(tasks)))
        if await stopped_within(stop, _POLL_SECONDS):
            return None
    means, num_unscored = [], 0
    for scores in (await store.tag_scores(tag)).values():
        given = [score for score in scores if score is not None]
        num_unscored += len(scores) - len(given)
        if given:
            means.append(sum(given) / len(given))
    if not means:
        raise StoreError(f"evaluation {tag}: not one of {len(tasks)} questions got a score")
    return EvalMetrics(
        version=version,
        reward_mean=sum(means) / len(means),
        num_tasks=len(means),
        num_unscored=num_unscored,
        seconds=time.monotonic() - started,
    )


async def stopped_within(stop: asyncio.Event, seconds: float) -> bool:
    """Wait for `seconds`, or until `stop` is set; return whether it is."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return False
    return True


async def _free_tag(store: TrajectoryStore, version: int, *, reuse: bool) -> str:
    """Return `eval@version`, with a number where that belongs to weights of a lost past.

    A crash takes the run back to a checkpoint; versions after it are then made anew.
    """
    tag = f"eval@{version}"
    number = 1
    while not reuse and await store.count_tasks(tag=tag):
        number += 1
        tag = f"eval@{version}.{number}"
    return tag


def _as_evaluation(tasks: Sequence[Task], tag: str) -> list[Task]:
    name = tag.removeprefix("eval@")
    return [
        task.model_copy(
            update={
                "id": f"eval/{name}/{task.id.rpartition('/')[2]}",
                "split": "eval",
                "order": position - len(tasks),
                "tag": tag,
            }
        )
        for position, task in enumerate(tasks)
    ]


async def _what_is_missing(store: TrajectoryStore, tag: str, num_done: int, num_tasks: int) -> str:
    services = await store.services()
    num_up = sum(service.status == "up" for service in services)
    num_sampling = sum(info.status == "sampling" for info in await store.samplers())
    return (
        f"evaluation {tag}: {num_done} of {num_tasks} questions were finished in time; "
        f"{num_up} inference server(s) up, {num_sampling} sampler(s) registered "
        "(raise --eval_timeout_seconds, or look at the samplers' logs)"
    )
