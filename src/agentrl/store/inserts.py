"""Inserts that may be repeated."""

from collections.abc import Sequence

from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import BulkWriteError

from agentrl.store.codec import Document

DUPLICATE_KEY = 11000


async def insert_new(collection: AsyncCollection[Document], documents: Sequence[Document]) -> int:
    """Insert the documents whose `_id` is not there yet; return how many that were."""
    if not documents:
        return 0
    try:
        await collection.insert_many(documents, ordered=False)
    except BulkWriteError as error:
        details = error.details or {}
        if any(e["code"] != DUPLICATE_KEY for e in details.get("writeErrors", ())):
            raise
        if details.get("writeConcernErrors"):
            raise
        return int(details["nInserted"])
    return len(documents)
