"""Decides which failures of a run's processes a restart can fix, and restarts the private mongod.

A process that was killed, or that lost the database for too long, is restarted. A process that
exited deliberately (a usage error, a loss that stays non-finite) is not, because it would exit
again for the same reason.
"""

import asyncio
import logging
import os
import re
import time

from agentrl.errors import StoreError
from agentrl.runtime.disk_space import full_disk
from agentrl.runtime.processes.child_processes import Child
from agentrl.runtime.processes.restarts import Restarts, ending
from agentrl.store.private_mongod import EmbeddedMongo

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
PROBE_SECONDS = 2.0
"""How often the mongod is asked whether it answers, and how long it may take."""
_MAX_UNANSWERED = 5
_TAIL_LINES = 200
# `accelerate launch` always exits with status 1, and reports the first rank that failed.
_FIRST_RANK = re.compile(r"failed \(exitcode: (-?\d+)\)")


def was_interrupted(child: Child, status: int) -> bool:
    """Return whether a child was killed or exited because of a temporary failure."""
    rank = _FIRST_RANK.search(child.log_tail(_TAIL_LINES)) if status > 0 else None
    status = int(rank[1]) if rank else status
    return status < 0 or status == os.EX_TEMPFAIL


class _HangWatch:
    """Kills a mongod that runs and does not answer."""

    def __init__(self, mongo: EmbeddedMongo) -> None:
        self._mongo = mongo
        self._asked_at = time.monotonic()
        self._num_unanswered = 0

    async def check(self) -> None:
        """Ask the mongod, at most every `PROBE_SECONDS`."""
        if time.monotonic() - self._asked_at < PROBE_SECONDS:
            return
        # Failures are counted, since time also passes while this process itself is suspended.
        is_well = self._mongo.exit_status() is not None or await self._mongo.answers(PROBE_SECONDS)
        self._num_unanswered = 0 if is_well else self._num_unanswered + 1
        self._asked_at = time.monotonic()
        if self._num_unanswered >= _MAX_UNANSWERED:
            logger.warning(
                "mongod (process %d) runs but answered none of %d requests within %g s each; "
                "killing it",
                *(self._mongo.pid, self._num_unanswered, PROBE_SECONDS),
            )
            self._mongo.kill()
            self._num_unanswered = 0


async def keep_running(mongo: EmbeddedMongo, restarts: Restarts) -> None:
    """Restart the private mongod, on its port and data, when it exits or hangs; until cancelled.

    Call it in the main thread.
    """
    watch = _HangWatch(mongo)
    while True:
        await asyncio.sleep(_POLL_SECONDS)
        await watch.check()
        # Check before the disk is completely full: mongod then hangs instead of exiting.
        full = full_disk(mongo.data_dir)
        if full is not None:
            raise StoreError(full)
        status, last_error = mongo.exit_status(), ""
        while status is not None:
            if not mongo.data_dir.is_dir():
                text = (
                    f"the private mongod {ending(status)}: its data in {mongo.data_dir} was deleted"
                )
                logger.error("%s; stopping the processes of the run", text)
                raise StoreError(text)
            delay = restarts.next_delay()
            if delay is None:
                raise StoreError(
                    (f"the private mongod {ending(status)}, too many times {last_error}").rstrip()
                )
            logger.warning("mongod %s", restarts.describe(status))
            await asyncio.sleep(delay)
            mongo.spawn()
            try:
                await asyncio.to_thread(mongo.until_writable)
                status = None
            except StoreError as error:
                last_error = f"({error})"
                logger.warning("%s", error)
