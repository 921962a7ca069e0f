"""Motor's clients, made to look like PyMongo's own asynchronous ones.

Motor is at the end of its life and is not imported here; a caller that still has one of its clients
may hand it in. Only where its calls differ is anything done: `aggregate` is no coroutine there.
"""

from typing import Any


def is_motor(client: object) -> bool:
    """Return whether a client is one of Motor's."""
    return type(client).__module__.partition(".")[0] == "motor"


class MotorDatabase:
    """A database of an `AsyncIOMotorClient`."""

    def __init__(self, database: Any) -> None:
        self._database = database

    def __getitem__(self, name: str) -> "MotorCollection":
        return MotorCollection(self._database[name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)


class MotorCollection:
    """A collection of an `AsyncIOMotorClient`."""

    def __init__(self, collection: Any) -> None:
        self._collection = collection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collection, name)

    async def aggregate(self, *args: Any, **options: Any) -> Any:
        """Return the cursor, as PyMongo's coroutine does."""
        return self._collection.aggregate(*args, **options)
