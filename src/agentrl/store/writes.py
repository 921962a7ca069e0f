"""Writes of one document or of many, cheap for one and cheap for many."""

from collections.abc import Sequence

from pymongo import UpdateOne
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import BulkWriteError, DuplicateKeyError

from agentrl.store.codec import Document

DUPLICATE_KEY = 11000

Update = tuple[Document, Document | list[Document]]
"""A filter, and what is done to the document that it matches."""


async def insert_new(collection: AsyncCollection[Document], documents: Sequence[Document]) -> int:
    """Insert the documents whose `_id` is not there yet; return how many that were.

    It may be repeated.
    """
    if not documents:
        return 0
    try:
        if len(documents) == 1:
            await collection.insert_one(documents[0])
        else:
            await collection.insert_many(documents, ordered=False)
    except DuplicateKeyError:
        return 0
    except BulkWriteError as error:
        details = error.details or {}
        if any(e["code"] != DUPLICATE_KEY for e in details.get("writeErrors", ())):
            raise
        if details.get("writeConcernErrors"):
            raise
        return int(details["nInserted"])
    return len(documents)


async def update_each(collection: AsyncCollection[Document], updates: Sequence[Update]) -> int:
    """Update one document a filter, in any order; return how many filters matched.

    A lone update, which is what one rollout sends, goes without the driver's work for a bulk.
    """
    if len(updates) == 1:
        return (await collection.update_one(*updates[0])).matched_count
    requests = [UpdateOne(wanted, change) for wanted, change in updates]
    return (await collection.bulk_write(requests, ordered=False)).matched_count
