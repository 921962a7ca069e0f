"""Forward migrations: a database of an earlier release is brought to this one's schema.

`MIGRATIONS[n]` takes version n to n + 1. A migration may be repeated and may run in several
processes at once: it only fills in what is missing. The version is raised after it is through, so
one that was interrupted is done again. There is no way back; a newer database is refused.
"""

import logging
from collections.abc import Awaitable, Callable

from pymongo import UpdateMany
from pymongo.asynchronous.database import AsyncDatabase

from agentrl.errors import StoreError
from agentrl.schema import SCHEMA_VERSION
from agentrl.store.codec import Document, task_version

logger = logging.getLogger(__name__)

Migration = Callable[[AsyncDatabase[Document]], Awaitable[None]]


async def _add_task_versions(database: AsyncDatabase[Document]) -> None:
    """1 -> 2: the record data name the version of their question."""
    missing = {"task_version": {"$exists": False}}
    updates = [
        UpdateMany(
            {"task_id": task["_id"], **missing}, {"$set": {"task_version": task_version(task)}}
        )
        async for task in database["tasks"].find({"status": "completed"})
    ]
    if updates:
        await database["record_data"].bulk_write(updates, ordered=False)


MIGRATIONS: dict[int, Migration] = {1: _add_task_versions}


async def migrate(database: AsyncDatabase[Document]) -> None:
    """Bring the run of this database to `SCHEMA_VERSION`; no run, nothing to do.

    Raises:
        StoreError: a newer release wrote it, or no migration leads here.
    """
    run = await database["runs"].find_one({}, {"schema_version": 1})
    if run is None:
        return
    version = run["schema_version"]
    while version != SCHEMA_VERSION:
        if version not in MIGRATIONS or version > SCHEMA_VERSION:
            raise StoreError(
                f"database {database.name!r} has schema version {version}, "
                f"this AgentRL needs {SCHEMA_VERSION}"
            )
        await MIGRATIONS[version](database)
        await database["runs"].update_one(
            {"_id": run["_id"], "schema_version": version}, {"$inc": {"schema_version": 1}}
        )
        logger.info("database %s: schema version %d -> %d", database.name, version, version + 1)
        version += 1
