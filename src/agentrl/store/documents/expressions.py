"""Filters and pipeline updates that the operations on a Record's lifecycle share.

All lease times are the server's (`$$NOW`), so clocks of different hosts never meet. Free text is
wrapped in `$literal`: a `$` in it would otherwise be read as a field path.
"""

from typing import Any

from agentrl.errors import LeaseLost
from agentrl.schema import RECORD_TRANSITIONS, RecordStatus
from agentrl.store.documents.codec import Document, encode

NEXT_FENCE = {"$add": ["$fence", 1]}
LEASE_EXPIRED = {"$expr": {"$lt": ["$lease.expires_at", "$$NOW"]}}


def literal(value: Any) -> Document:
    """Return an expression that means `value` and nothing else."""
    return {"$literal": value}


def after(seconds: float) -> Document:
    """Return the expression for the server's time, `seconds` from now."""
    return {"$add": ["$$NOW", round(seconds * 1000)]}


def lease(owner: str, fence: Any, lease_seconds: float) -> Document:
    """Return the expression of a Lease that begins now."""
    return {"owner": literal(owner), "fence": fence, "expires_at": after(lease_seconds)}


def nobodys_lease(free_in_seconds: float) -> Document:
    """Return the lease of a finished Record that waits for a scorer: fence 0 is nobody's."""
    return {"owner": "", "fence": literal(0), "expires_at": after(free_in_seconds)}


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
    return {
        "$map": {
            "input": "$attempts",
            "as": "a",
            "in": {
                "$cond": [
                    {"$eq": ["$$a.fence", "$fence"]},
                    {"$mergeObjects": ["$$a", closing]},
                    "$$a",
                ]
            },
        }
    }


NUM_FAILED_ATTEMPTS = {
    "$size": {
        "$filter": {
            "input": "$attempts",
            "as": "a",
            "cond": {"$in": ["$$a.ended_by", ["expired", "error"]]},
        }
    }
}
"""Attempts that count against `max_attempts`; those handed back do not."""


def attempt_failed(ended_by: str, error: str, max_attempts: int) -> list[Document]:
    """Return the update that ends an attempt: back to `pending`, or parked as `failed`."""
    parked = {"$gte": [NUM_FAILED_ATTEMPTS, max_attempts]}
    return [
        {"$set": {"attempts": attempts_closed(ended_by, error), "lease": None}},
        {
            "$set": {
                "status": {"$cond": [parked, "failed", "pending"]},
                "error": literal(encode(error)),
                "finished_at": {"$cond": [parked, "$$NOW", None]},
            }
        },
    ]


def lease_lost(record_id: str, fence: int) -> LeaseLost:
    """Return the error of a holder whose lease is gone."""
    return LeaseLost(f"record {record_id!r}: the lease with fence {fence} is lost")
