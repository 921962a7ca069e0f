"""Filters and pipeline updates that the operations on a Record's lifecycle share.

All lease times are the server's (`$$NOW`), so the clocks of other hosts do not matter. Free text is
wrapped in `$literal`: a `$` in it would otherwise be read as a field path.
"""

from typing import Any

from agentrl.errors import LeaseLost
from agentrl.schema import RECORD_TRANSITIONS, RecordStatus
from agentrl.store.documents.codec import Document, encode

NEXT_FENCE = {"$add": ["$fence", 1]}
NO_HOLDER = 0
"""Fence in the lease of a Record that waits for a scorer."""
FAILED_ENDS = ["expired", "error"]
"""Values of `ended_by` for infrastructure failures."""
FAILED_ATTEMPTS: Document = {
    "$filter": {"input": "$attempts", "cond": {"$in": ["$$this.ended_by", FAILED_ENDS]}}
}
"""Attempts that count against `max_attempts`; released ones do not."""
UNSCORABLE: Document = {"status": "failed", "outcome": {"$gt": ""}}
"""Filter of the Records whose rollouts finished, but whose scorer has a defect."""
HAS_FAILURE: Document = {
    "$or": [
        {"status": "failed"},
        {"error": {"$gt": ""}},
        {"attempts.ended_by": {"$in": FAILED_ENDS}},
    ]
}
"""Filter of the Records with an infrastructure failure. A partial index uses it, so it expresses
"has a text" as `$gt: ""`."""


def literal(value: Any) -> Document:
    """Return the expression of `value` as it is, without interpretation."""
    return {"$literal": value}


def after(seconds: float) -> Document:
    """Return the expression for the server's time, `seconds` from now."""
    return {"$add": ["$$NOW", round(seconds * 1000)]}


def lease(owner: str, fence: Any, lease_seconds: float) -> Document:
    """Return the expression of a Lease that starts now."""
    return {"owner": literal(owner), "fence": fence, "expires_at": after(lease_seconds)}


def waiting_lease(free_in_seconds: float) -> Document:
    """Return the lease of a finished Record that waits for a scorer: no holder has fence 0."""
    return {"owner": "", "fence": literal(NO_HOLDER), "expires_at": after(free_in_seconds)}


def may_become(status: RecordStatus) -> Document:
    """Return the filter on `status` that lets only legal transitions to `status` through."""
    sources = sorted(s for s, targets in RECORD_TRANSITIONS.items() if status in targets)
    return {"$in": sources} if len(sources) > 1 else {"$eq": sources[0]}


def held(record_id: str, fence: int) -> Document:
    """Return the filter that matches a Record only for the holder of its current lease."""
    return {"_id": record_id, "lease.fence": fence}


def attempts_closed(ended_by: str, error: str | None) -> Document:
    """Return the expression of `attempts` with the current one ended now."""
    closing = {
        "ended_at": "$$NOW",
        "ended_by": literal(ended_by),
        "error": literal(encode(error)),
    }
    current = {"$eq": ["$$this.fence", "$fence"]}
    closed = {"$cond": [current, {"$mergeObjects": ["$$this", closing]}, "$$this"]}
    return {"$map": {"input": "$attempts", "in": closed}}


def attempt_failed(ended_by: str, error: str, max_attempts: int) -> list[Document]:
    """Return the update that ends an attempt: back to `pending`, or dead-lettered as `failed`."""
    exhausted = {"$gte": [{"$size": FAILED_ATTEMPTS}, max_attempts]}
    return [
        # Two stages: the second counts the attempt that the first has ended.
        {"$set": {"attempts": attempts_closed(ended_by, error), "lease": None}},
        {
            "$set": {
                "status": {"$cond": [exhausted, "failed", "pending"]},
                "error": literal(encode(error)),
                "finished_at": {"$cond": [exhausted, "$$NOW", None]},
            }
        },
    ]


def lease_lost(record_id: str, fence: int) -> LeaseLost:
    """Return the error of a holder that lost its lease."""
    return LeaseLost(f"record {record_id!r}: the lease with fence {fence} is lost")


def lookup(source: str, local: str, foreign: str, name: str, *pipeline: Document) -> Document:
    """Return the stage that adds the documents of `source` with `foreign` equal to `local`."""
    stage = {"from": source, "localField": local, "foreignField": foreign, "as": name}
    return {"$lookup": {**stage, "pipeline": list(pipeline)} if pipeline else stage}


def shown(*names: str) -> Document:
    """Return the projection of these fields as they are."""
    return dict.fromkeys(names, 1)
