"""Removes the turns of old steps beside the training loop (`--retain_steps`).

The bound is read from the checkpoints on disk: a step that the oldest of them does not contain is
trained again if the run resumes from it. The work takes at most a fifth of the time, batch by batch,
so that the run's own queries are not delayed.
"""

import asyncio
import logging
import time

from agentrl.config.sections import RootConfig
from agentrl.errors import StoreError
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore
from agentrl.trainer.checkpoint import checkpoint_paths

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 10.0
_REST_SHARE = 4.0
"""Rest after a batch, in units of the time that the batch took."""


async def retain(store: TrajectoryStore, config: RootConfig) -> None:
    """Expire old steps until cancelled; return at once where nothing is to be removed."""
    if config.trainer.consumer != DEFAULT_CONSUMER or config.store.retain_steps is None:
        return
    while True:
        try:
            await expire_due(store, config)
        except StoreError as error:
            logger.warning("old turns are kept for now: %s", error)
        await asyncio.sleep(_CHECK_SECONDS)


async def expire_due(
    store: TrajectoryStore, config: RootConfig, *, rest_share: float = _REST_SHARE
) -> int:
    """Remove the turns of all steps that may expire now; return their number."""
    retention = store.retention
    num_turns = 0
    for step in range(
        await retention.expired_step() + 1, await _last_expiring_step(store, config) + 1
    ):
        expiring = await retention.of_step(step)
        if expiring.waits_for:
            logger.info(
                "the turns of step %d stay until trainer %r has consumed its groups",
                *(step, expiring.waits_for),
            )
            break
        for batch in expiring.batches:
            started = time.monotonic()
            num_turns += await retention.expire(batch)
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
