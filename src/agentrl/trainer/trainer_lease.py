"""The trainer's lease on a run: acquired, renewed in the background, released."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.errors import AgentRLError, LeaseLost, StoreError, TrainerBusy
from agentrl.runtime.processes.process_identity import is_alive, is_dead, new_lease_owner
from agentrl.schema import Lease
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)

# Waiting time beyond the lease's duration: a holder killed on another host leaves a lease that must
# expire first.
_GRACE_SECONDS = 2.0
_RETRY_SECONDS = 0.5


@asynccontextmanager
async def trainer_lease(
    store: TrajectoryStore, consumer: str, *, lease_seconds: float
) -> AsyncIterator[None]:
    """Hold the lease that makes this process the run's only trainer named `consumer`."""
    await _acquire(store, consumer, lease_seconds)
    body = asyncio.current_task()
    assert body is not None
    renewal = asyncio.create_task(_renew(store, consumer, lease_seconds))

    def stop_body(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            body.cancel()

    renewal.add_done_callback(stop_body)
    try:
        yield
    except asyncio.CancelledError:
        if renewal.done() and not renewal.cancelled() and (error := renewal.exception()):
            # The renewal cancelled this task, so its error is raised instead of the cancellation.
            body.uncancel()
            raise error from None
        raise
    finally:
        renewal.cancel()
        with contextlib.suppress(asyncio.CancelledError, AgentRLError):
            await renewal
        with contextlib.suppress(AgentRLError):
            await store.trainer_leases.release(consumer)


async def _acquire(store: TrajectoryStore, consumer: str, lease_seconds: float) -> None:
    owner = new_lease_owner()
    deadline = time.monotonic() + lease_seconds + _GRACE_SECONDS
    is_logged = False
    while True:
        try:
            await store.trainer_leases.acquire(consumer, owner, lease_seconds)
        except TrainerBusy as error:
            lease = await _lease(store, consumer)
            holder = lease.owner if lease is not None else None
            if holder is not None and is_dead(holder):
                logger.warning("taking over from %s, which is dead", holder)
                # The store lets an owner acquire its lease again, and an acquired one can be released.
                await store.trainer_leases.acquire(consumer, holder, lease_seconds)
                await store.trainer_leases.release(consumer)
                continue
            if time.monotonic() > deadline or (holder is not None and is_alive(holder)):
                raise
            if not is_logged:
                logger.warning("%s; waiting for it to expire", error)
                is_logged = True
            await asyncio.sleep(_RETRY_SECONDS)
        except StoreError as error:
            # Acquiring again under the same owner is harmless if only the reply was lost.
            if time.monotonic() > deadline:
                raise
            logger.warning("%s; retrying", error)
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            return


async def _lease(store: TrajectoryStore, consumer: str) -> Lease | None:
    run = await store.runs.get()
    return run.trainer_leases.get(consumer) if run else None


async def _renew(store: TrajectoryStore, consumer: str, lease_seconds: float) -> None:
    """Renew the lease until cancelled.

    Three attempts per lease duration, so one lost request does not lose the lease.
    """
    renewed = time.monotonic()
    while True:
        await asyncio.sleep(lease_seconds / 3)
        try:
            await store.trainer_leases.renew(consumer, lease_seconds)
        except LeaseLost:
            raise
        except AgentRLError as error:
            if time.monotonic() - renewed > lease_seconds:
                raise LeaseLost(
                    f"the trainer lease {consumer!r} could not be renewed for "
                    f"{lease_seconds:g} s: {error}"
                ) from error
            logger.warning("the trainer lease could not be renewed: %s", error)
        else:
            renewed = time.monotonic()
