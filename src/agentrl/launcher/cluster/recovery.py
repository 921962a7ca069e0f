"""Decides which failures of a run's processes a restart can fix, and restarts the private mongod.

A process that was killed, or that lost the database for too long, is restarted. A process that
exited deliberately (a usage error, a loss that stays non-finite) is not, because it would exit
again for the same reason.
"""

import asyncio
import logging
import os
import re

from agentrl.errors import StoreError
from agentrl.runtime.disk_space import full_disk
from agentrl.runtime.processes.child_processes import Child
from agentrl.runtime.processes.restarts import Restarts, ending
from agentrl.store.private_mongod import EmbeddedMongo

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_TAIL_LINES = 200
# `accelerate launch` always exits with status 1, and reports the first rank that failed.
_FIRST_RANK = re.compile(r"failed \(exitcode: (-?\d+)\)")
# A command's error message, or the last line of a traceback, which may be inside an exception group.
_ERROR = re.compile(r"(?:\[rank\d+\]: |[ |]+)?(agentrl \w+: .+|[\w.]*(?:Error|Exception): .+)")


def was_interrupted(child: Child, status: int) -> bool:
    """Return whether a child was killed or exited because of a temporary failure."""
    rank = _FIRST_RANK.search(child.log_tail(_TAIL_LINES)) if status > 0 else None
    status = int(rank[1]) if rank else status
    return status < 0 or status == os.EX_TEMPFAIL


def last_error(child: Child) -> str:
    """Return the line of a failed child's log that gives the reason; the last line if none does.

    `accelerate launch` appends its own report, without a reason, to the ranks' output.
    """
    errors = [_ERROR.fullmatch(line) for line in child.log_tail(_TAIL_LINES).splitlines()]
    messages = [error[1] for error in errors if error is not None]
    return messages[-1] if messages else child.log_tail(1)


async def keep_running(mongo: EmbeddedMongo, restarts: Restarts) -> None:
    """Restart the private mongod, on its port and data, when it exits; until cancelled.

    Call it in the main thread.
    """
    while True:
        await asyncio.sleep(_POLL_SECONDS)
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
