"""Turns: durable before the call returns, stored as the difference to their parent.

Tool results travel in the request of the next turn that the process appends, for any Record, or in
a separate request a moment later: a request to the server costs as much as its contents.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from agentrl.errors import LeaseLost, StoreError
from agentrl.schema import DispatchedSamplingTask, Seat, ToolResult
from agentrl.store.database import Repository, RunDatabase, operation
from agentrl.store.documents.codec import Document, encode, require
from agentrl.store.documents.expressions import held, lease_lost, shown
from agentrl.store.documents.packed_turns import (
    LARGE_BYTES,
    ToolsPacker,
    pack,
    pack_values,
    packed_keys,
    result_keys,
    unpack,
)
from agentrl.store.repositories.blobs import BlobRepository
from agentrl.store.writes import Coalescer, Update, insert_and_update, update_each

CARRY_SECONDS = 0.1
"""Longest time that tool results wait for a turn to travel with."""


class _Append(NamedTuple):
    turn: DispatchedSamplingTask
    fence: int

    @property
    def claim(self) -> tuple[str, str, int]:
        return self.turn.id, self.turn.record_id, self.fence


class _Results(NamedTuple):
    claim: tuple[str, str, int]
    """Turn id, record id and fence."""
    results: Sequence[ToolResult]


class TurnRepository(Repository):
    """Appends and reads the turns of Records."""

    def __init__(self, database: RunDatabase, blobs: BlobRepository) -> None:
        super().__init__(database)
        self._blobs = blobs
        self._tools = ToolsPacker()
        self._writes: Coalescer[_Append | _Results, LeaseLost | None]
        self._writes = Coalescer(self._write_all)

    @operation("append a turn")
    async def append(self, turn: DispatchedSamplingTask, fence: int) -> None:
        """Store a turn; it is durable on return.

        Raises:
            LeaseLost: the caller's lease is gone; the turn is not part of the record.
        """
        await self._writes.submit(_Append(turn, fence))

    @operation("store tool results")
    async def set_tool_results(
        self, turn_id: str, record_id: str, fence: int, results: Sequence[ToolResult]
    ) -> None:
        """Store the results of a turn's tool calls; durable on return.

        A turn that is appended after this call starts is not stored before the results.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        item = _Results((turn_id, record_id, fence), results)
        await self._writes.submit(item, wait_seconds=CARRY_SECONDS)

    async def _write_all(self, items: Sequence[_Append | _Results]) -> list[LeaseLost | None]:
        """Store turns and tool results, then have the Records acknowledge the turns."""
        appends = [item for item in items if isinstance(item, _Append)]
        packed = [pack(turn, self._tools) for turn, _ in appends]
        # Blobs, then turns, then the Records that name them: a crash in between leaves a blob or a
        # turn that nothing refers to (`maintenance.compact` deletes it), never a dangling
        # reference.
        await self._blobs.put(blob for _, blobs in packed for blob in blobs)
        updates, refused = await self._result_updates(
            [item for item in items if isinstance(item, _Results)]
        )
        # The id of a turn contains the fence, so only an earlier attempt at this same request can
        # have inserted it.
        await insert_and_update(self._db.turns, [document for document, _ in packed], updates)
        refused |= await self._acknowledge(appends)
        return [refused.get(item.claim[0]) for item in items]

    async def _acknowledge(self, appends: Sequence[_Append]) -> dict[str, LeaseLost]:
        """Add turns to their Records; return the error of turns whose Record has another holder."""
        updates = [
            (
                {**held(turn.record_id, fence), "status": "running", "turns": {"$ne": turn.id}},
                record_update(turn),
            )
            for turn, fence in appends
        ]
        if await update_each(self._db.records, updates) == len(updates):
            return {}
        # A filter without a match means a lost lease, or an earlier attempt at this request whose
        # reply was lost. Reading the Records distinguishes the two.
        refused, unknown = await self._refused([append.claim for append in appends])
        await self._db.turns.delete_many({"_id": {"$in": unknown}})
        return refused

    async def _result_updates(
        self, items: Sequence[_Results]
    ) -> tuple[list[Update], dict[str, LeaseLost]]:
        """Return the updates that store results, and the error of each rejected one."""
        # Results are written to the turn, which has no lease, so the Record's lease is checked first. A
        # holder that loses it in between may still write once, but only results of the same calls.
        unverified = [item.claim for item in items if not self._db.leases.holds(*item.claim[1:])]
        refused, _ = await self._refused(unverified) if unverified else ({}, [])
        updates: list[Update] = []
        for (turn_id, _, _), results in items:
            if turn_id not in refused:
                values = [encode(result.model_dump()) for result in results]
                packed, blobs = pack_values("tool_results", values, LARGE_BYTES)
                await self._blobs.put(blobs)
                update: Document = {"$set": {"tool_results": packed}}
                keys = sorted(result_keys(packed))
                if keys:
                    update["$addToSet"] = {"blobs": {"$each": keys}}
                updates.append(({"_id": turn_id}, update))
        return updates, refused

    @operation("store rewards of turns")
    async def set_rewards(
        self,
        rewards: Mapping[str, float],
        record_id: str,
        fence: int,
        *,
        seats: Mapping[str, Seat] = MappingProxyType({}),
    ) -> None:
        """Store the rewards of a Record's turns, and what their seats earned, by turn id.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        changes: dict[str, Document] = {turn_id: {} for turn_id in (*rewards, *seats)}
        for turn_id, reward in rewards.items():
            changes[turn_id]["reward"] = reward
        for turn_id, seat in seats.items():
            changes[turn_id]["seat"] = seat.model_dump()
        refused, _ = await self._refused([(turn_id, record_id, fence) for turn_id in changes])
        for error in refused.values():
            raise error
        updates: list[Update] = [
            ({"_id": turn_id}, {"$set": fields}) for turn_id, fields in changes.items()
        ]
        await update_each(self._db.turns, updates)

    async def _refused(
        self, claims: list[tuple[str, str, int]]
    ) -> tuple[dict[str, LeaseLost], list[str]]:
        """Check (turn id, record id, fence) against the records.

        Returns:
            The error, by turn id, of each turn that its record does not confirm, and the ids of the
            turns that their record does not list at all.
        """
        found = self._db.records.find(
            {"_id": {"$in": [record_id for _, record_id, _ in claims]}},
            {"status": 1, "lease.fence": 1, "turns": 1},
        )
        records = {document["_id"]: document async for document in found}
        refused, unknown = {}, []
        for turn_id, record_id, fence in claims:
            record = records.get(record_id, {"status": None, "turns": ()})
            current_fence = (record.get("lease") or {}).get("fence")
            is_listed = turn_id in record["turns"]
            if not is_listed or record["status"] != "running" or current_fence != fence:
                refused[turn_id] = lease_lost(record_id, fence)
            if not is_listed:
                unknown.append(turn_id)
        return refused, unknown

    @operation("read turns")
    async def of_record(
        self, record_id: str, attempt: int | None = None
    ) -> list[DispatchedSamplingTask]:
        """Return the turns of one attempt in order: the Record's current one, or any earlier.

        There are none once they have expired.
        """
        columns = shown("attempt", "turns", "expired_at")
        record = require(
            await self._db.records.find_one({"_id": record_id}, columns), f"record {record_id!r}"
        )
        if attempt in (None, record["attempt"]) and not record.get("expired_at"):
            return await self.get_many(record["turns"])
        found = self._db.turns.find({"record_id": record_id, "attempt": attempt}).sort("index", 1)
        # A holder may have died between storing a turn and adding it to the Record. The process
        # that resumed the attempt then sampled that turn again under a higher fence.
        latest: dict[int, Document] = {}
        async for document in found:
            known = latest.get(document["index"])
            if known is None or _fence_of(known) < _fence_of(document):
                latest[document["index"]] = document
        return await self._unpack_all(list(latest.values()))

    @operation("read turns")
    async def of_records(self, record_ids: Sequence[str]) -> list[DispatchedSamplingTask]:
        """Return the turns of the current attempts of several Records, record by record.

        Records whose turns have expired have none.
        """
        kept = {"_id": {"$in": list(record_ids)}, "expired_at": None}
        found = self._db.records.find(kept, {"turns": 1})
        turns = {record["_id"]: record["turns"] async for record in found}
        return await self.get_many(
            [turn_id for record_id in record_ids for turn_id in turns.get(record_id, ())]
        )

    @operation("read turns")
    async def get_many(self, turn_ids: Sequence[str]) -> list[DispatchedSamplingTask]:
        """Return the turns of these ids, in the order of the ids, with one query per collection.

        Raises:
            StoreError: a turn is missing.
        """
        found = {d["_id"]: d async for d in self._db.turns.find({"_id": {"$in": list(turn_ids)}})}
        missing = set(turn_ids) - found.keys()
        if missing:
            raise StoreError(f"turn {min(missing)!r} is missing from the database")
        return await self._unpack_all([found[turn_id] for turn_id in turn_ids])

    async def _unpack_all(self, documents: list[Document]) -> list[DispatchedSamplingTask]:
        blobs = await self._blobs.get(
            key for document in documents for key in packed_keys(document)
        )
        return [unpack(document, blobs) for document in documents]


def record_update(turn: DispatchedSamplingTask) -> Document:
    """Return the update that adds a turn to its Record."""
    update: Document = {
        "$push": {"turns": turn.id},
        "$inc": {
            "num_prompt_tokens": len(turn.added_ids),
            "num_output_tokens": len(turn.output_ids),
            "num_tool_calls": sum(call.format_error is None for call in turn.tool_calls),
        },
    }
    tool_names = sorted({call.name for call in turn.tool_calls})
    if tool_names:
        update["$addToSet"] = {"tool_names": {"$each": encode(tool_names)}}
    versions = [span.version for span in turn.version_spans]
    if versions and turn.trainable:
        update["$min"] = {"min_version": min(versions)}
        update["$max"] = {"max_version": max(versions)}
    return update


def _fence_of(document: Document) -> int:
    return int(document["_id"].rsplit("/", 2)[1])
