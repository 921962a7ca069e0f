"""Removes the turns of old steps beside the training loop (`--retain_steps`, `--retain_days`).

The bound is read from the checkpoints on disk: a step that the oldest of them does not contain is
trained again if the run resumes from it. The work takes at most a fifth of the time, batch by batch,
so that the run's own queries are not delayed.
"""

import asyncio
import itertools
import logging
import time
from pathlib import Path

from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError, StoreError, WriteError
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore
from agentrl.trainer.checkpoint import checkpoint_paths

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 10.0
_REST_SHARE = 4.0
"""Rest after a batch, in units of the time that the batch took."""
_DAY_SECONDS = 86_400.0


async def retain(store: TrajectoryStore, config: RootConfig) -> None:
    """Expire old steps until cancelled; return at once where nothing is to be removed."""
    section = config.store
    is_leading = config.trainer.consumer == DEFAULT_CONSUMER
    if not is_leading or (section.retain_steps is None and section.retain_days is None):
        return
    while True:
        try:
            await expire_due(store, config)
        except (ConfigError, StoreError, WriteError) as error:
            logger.warning("old turns are kept for now: %s", error)
        await asyncio.sleep(_CHECK_SECONDS)


async def expire_due(
    store: TrajectoryStore, config: RootConfig, *, rest_share: float = _REST_SHARE
) -> int:
    """Remove the turns of all steps that may expire now; return their number.

    Args:
        store: of the run.
        config: of the run.
        rest_share: rest after a batch, in units of the time that the batch took.

    Raises:
        StoreError: the store failed.
        WriteError: the archive cannot be written; its groups stay.
    """
    retention, archive = store.retention, config.store.archive_dir
    num_turns = 0
    for step in range(
        await retention.expired_step() + 1, await _last_expiring_step(store, config) + 1
    ):
        if not await _is_old(store, step, config.store.retain_days):
            break
        expiring = await retention.of_step(step)
        if expiring.waits_for:
            logger.info(
                "the turns of step %d stay until trainer %r has consumed its groups",
                *(step, expiring.waits_for),
            )
            break
        for batch in expiring.batches:
            started = time.monotonic()
            folder = None if archive is None else await asyncio.to_thread(_new_part, archive, step)
            num_turns += await retention.expire(batch, folder)
            await asyncio.sleep(rest_share * (time.monotonic() - started))
        await retention.finish_step(step)
    if num_turns:
        logger.info("removed %d turns of steps up to %d", num_turns, await retention.expired_step())
    return num_turns


async def _last_expiring_step(store: TrajectoryStore, config: RootConfig) -> int:
    """Return the last step that neither a checkpoint, a replay nor another training needs."""
    saved = [int(path.name) for path in checkpoint_paths(config.run.output_path)]
    run = await store.runs.get()
    if not saved or run is None:
        return 0
    bounds = [min(saved)]
    if config.store.retain_steps is not None:
        bounds.append(max(saved) - config.store.retain_steps)
    if config.algorithm.max_trained_count > 1:
        bounds.append(run.control.oldest_version(max(saved) + 1))
    return min(bounds)


async def _is_old(store: TrajectoryStore, step: int, retain_days: float | None) -> bool:
    if retain_days is None:
        return True
    figures = await store.figures.step(DEFAULT_CONSUMER, step)
    return figures is not None and figures["time"] <= time.time() - retain_days * _DAY_SECONDS


def _new_part(archive: Path, step: int) -> Path:
    """Return a new folder for a batch of a step."""
    names = (archive / f"{step:08d}-{number:04d}" for number in itertools.count(1))
    return next(path for path in names if not path.exists())
