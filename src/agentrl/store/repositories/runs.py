"""The `runs` document: identity, controls, admission, and trainer leases."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError
from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError

from agentrl.errors import ConfigError, LeaseLost, StoreError, TrainerBusy
from agentrl.runtime.installation import package_version
from agentrl.schema import (
    ENDED_RUNS,
    SCHEMA_VERSION,
    ConfigChange,
    Control,
    Lease,
    Run,
    RunPhase,
    RunStatus,
)
from agentrl.schema.ledger_origin import Retrain
from agentrl.schema.lost_versions import LostVersions, version_of
from agentrl.store.collections.indexes import ledger_indexes
from agentrl.store.database import Repository, RunDatabase, operation
from agentrl.store.documents.codec import Document, encode, from_document, to_document
from agentrl.store.documents.expressions import after, lease, literal

DEFAULT_CONSUMER = "trainer"
"""Default name of a trainer: its key in ledgers and leases."""
LOG_LENGTH = 200
"""Kept changes of controls, and of the configuration."""
_AUDITED = "control_audited"
"""Field with the controls of the last audit; a difference to `control` is an unlogged edit."""


class RunRepository(Repository):
    """Reads and changes the run's document."""

    @operation("create the run")
    async def create(self, run: Run) -> Run:
        """Store `run`, or return the existing run of that name unchanged.

        Raises:
            StoreError: the database belongs to another run.
        """
        existing = await self._db.runs.find_one()
        if existing is None:
            # All processes of a run start concurrently and try to create it; the first insert wins.
            with suppress(DuplicateKeyError):
                document = to_document(run.model_copy(update={"turns_name_blobs": True}))
                await self._db.runs.insert_one({**document, _AUDITED: document["control"]})
            existing = await self._db.runs.find_one() or {}
        if existing["_id"] != run.name:
            raise StoreError(
                f"database {self._db.name!r} contains run {existing['_id']!r}, not {run.name!r}; "
                "use another database or the same run name"
            )
        return from_document(Run, existing)

    @operation("read the schema version")
    async def check_schema(self) -> None:
        """Check that the run, if there is one, has this release's schema.

        Raises:
            StoreError: another release wrote it.
        """
        run = await self._db.runs.find_one({}, {"schema_version": 1, "trainer_leases": 1})
        version = SCHEMA_VERSION if run is None else run["schema_version"]
        if run is None or version == SCHEMA_VERSION:
            return
        release = "a later release" if version > SCHEMA_VERSION else "an earlier release"
        if name := run.get("trainer_leases", {}).get(DEFAULT_CONSUMER, {}).get("release"):
            release = f"AgentRL {name}, {release}"
        raise StoreError(
            f"database {self._db.name!r} has schema version {version}, and this AgentRL uses "
            f"{SCHEMA_VERSION}: it was written by {release}; use that release, or another --run_name"
        )

    @operation("read the run")
    async def get(self) -> Run | None:
        """Return the run of this database, or None before it is created."""
        document = await self._db.runs.find_one()
        return None if document is None else from_document(Run, document)

    @operation("change the run's controls")
    async def update_control(self, by: str = "", /, **changes: Any) -> Run:
        """Change fields of `Run.control` on the running run, and return the run.

        Args:
            by: author of the change, for `Run.control_log`.
            **changes: fields of `Control`; None restores the value of the last start.

        Raises:
            ConfigError: a field is unknown, or its value has the wrong type or is out of range.
            StoreError: there is no run.
        """
        unknown = sorted(changes.keys() - Control.model_fields.keys())
        if unknown:
            raise ConfigError(
                f"unknown control {unknown[0]!r}; known: {', '.join(Control.model_fields)}"
            )
        if None in changes.values():
            changes = {**changes, **await self._at_start(changes)}
        try:
            checked = Control.model_validate(changes, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ConfigError(
                f"{first['loc'][0]}: {first['msg']}, got {first['input']!r}"
            ) from None
        return await self._set_control(encode(checked.model_dump(include=set(changes))), by)

    async def _at_start(self, changes: Mapping[str, Any]) -> Document:
        """Return the values of the last start for the changes to None."""
        run = await self.get()
        if run is None:
            raise self._db.no_run()
        started = (run.flag_control or Control()).model_dump()
        return {name: started[name] for name, value in changes.items() if value is None}

    @operation("note lost versions")
    async def note_lost_versions(self, step: int) -> LostVersions | None:
        """Note that a run resumes after `step` although later versions were published or saved.

        Their weights are lost, and their numbers are not given again.

        Returns:
            The lost versions; None if there are none, or the last start noted them.
        """
        run = await self.get()
        if run is None:
            return None
        lost = run.lost_versions
        after = version_of(step, lost)
        newest = await self._db.policies.find_one({}, {"_id": 1}, sort=[("_id", -1)])
        published = 0 if newest is None else newest["_id"]
        last = max(published, run.policy_version, version_of(run.saved_step, lost))
        last = max([last, *(one.last for one in lost)])
        found = LostVersions(after=after, last=last)
        if last <= after or found in lost:
            return None
        kept = [one for one in lost if one.after < after]
        noted = [one.model_dump() for one in (*kept, found)]
        await self._db.runs.update_one({}, {"$set": {"lost_versions": noted, "saved_step": step}})
        return found

    @operation("apply the flags to the run's controls")
    async def apply_flags(self, flags: Control) -> Run:
        """Set the controls whose flags changed since the last start, and return the run.

        A control that was edited during the run keeps its value if the run is resumed with the same
        flags.

        Raises:
            StoreError: there is no run.
        """
        run = await self.get()
        if run is None:
            raise self._db.no_run()
        last = run.flag_control or run.control
        new = flags.model_dump()
        changed = {name for name, value in last.model_dump().items() if value != new[name]}
        if changed:
            await self._set_control(
                encode(flags.model_dump(include=changed)), "flags of the trainer"
            )
        return await self._change_run({"flag_control": literal(encode(new))})

    async def _set_control(self, values: Document, by: str) -> Run:
        fields = {
            f"{place}.{key}": literal(value)
            for place in ("control", _AUDITED)
            for key, value in values.items()
        }
        before = {key: f"$control.{key}" for key in values}
        log = {"control_log": _with_change(by, before, literal(values))}
        return await self._change_run({**fields, **log})

    @operation("audit the run's controls")
    async def audit_control(self) -> bool:
        """Log a change of the controls that was made directly in the database.

        Returns:
            Whether there was one.
        """
        log = _with_change("an edit in the database", f"${_AUDITED}", "$control")
        result = await self._db.runs.update_one(
            {"$expr": {"$ne": ["$control", f"${_AUDITED}"]}},
            [{"$set": {_AUDITED: "$control", "control_log": log}}],
        )
        return result.modified_count > 0

    @operation("store the run's configuration")
    async def set_config(self, config: dict[str, Any], step: int = 0) -> None:
        """Replace the configuration of the last start, and log the changes.

        Args:
            config: values by flag name.
            step: the last step before this start.
        """
        run = await self.get()
        if run is None:
            raise self._db.no_run()
        before = {name: value for name, value in run.config.items() if value != config.get(name)}
        log = run.config_log
        if before and step:
            log = (*log, ConfigChange(step=step, before=before))[-LOG_LENGTH:]
        changes = {"config": config, "config_log": [change.model_dump() for change in log]}
        await self._change_run({name: literal(value) for name, value in changes.items()})

    @operation("note a retrain")
    async def note_retrain(self, consumer: str, origin: Retrain) -> None:
        """Store what the trainer `consumer` repeats."""
        await self._change_run({f"retrains.{consumer}": literal(encode(origin.model_dump()))})

    @operation("set the run's owner")
    async def set_owner(self, owner: str) -> None:
        """Store who trains the run; no effect on a run that has an owner."""
        nobody = {"owner": {"$in": ["", None]}}
        await self._db.runs.update_one(nobody, {"$set": {"owner": owner}})

    @operation("store the digests of the run's texts")
    async def set_text_digests(self, digests: dict[str, str]) -> None:
        """Store which chat template and vocabulary the run has now."""
        await self._db.runs.update_one({}, {"$set": {"text_digests": digests}})

    @operation("set the run's status")
    async def set_status(self, status: RunStatus) -> Run:
        """Set the run's status, and return the run."""
        return await self._change_run({"status": literal(status)})

    @operation("reopen the run")
    async def reopen(self) -> None:
        """Let processes join an ended run that is being resumed; no effect on other runs.

        Samplers would otherwise end before the trainer, which may take minutes to load, sets the
        run's status.
        """
        ended = {"status": {"$in": sorted(ENDED_RUNS)}}
        await self._db.runs.update_one(ended, {"$set": {"status": "created"}})

    @operation("set the run's phase")
    async def set_phase(self, phase: RunPhase) -> None:
        """Store the run's current phase; no effect before the run exists."""
        changes = {"phase": literal(phase), "phase_at": "$$NOW"}
        await self._db.runs.update_one({}, [{"$set": changes}])

    @operation("set admission")
    async def set_admission(self, admitted_groups: int) -> Run:
        """Admit training groups with `order` below `admitted_groups`, and return the run."""
        return await self._change_run({"admitted_groups": literal(admitted_groups)})

    async def _change_run(self, expressions: Document) -> Run:
        document = await self._db.runs.find_one_and_update(
            {},
            [{"$set": {**expressions, "updated_at": "$$NOW"}}],
            return_document=ReturnDocument.AFTER,
        )
        if document is None:
            raise self._db.no_run()
        return from_document(Run, document)


class TrainerLeaseRepository(Repository):
    """Leases that let one process at a time train the run under each consumer name.

    This object remembers the fencing tokens of the leases it acquired. Writes reserved to the
    trainer (`check`, `renew`, ...) are refused if the database has another token.
    """

    def __init__(self, database: RunDatabase) -> None:
        super().__init__(database)
        self._fences: dict[str, int] = {}

    @operation("acquire the trainer's lease", repeatable=False)
    async def acquire(self, consumer: str, owner: str, lease_seconds: float) -> Lease:
        """Make `owner` the only trainer under the name `consumer`.

        Raises:
            ConfigError: `consumer` cannot be a field name.
            TrainerBusy: another owner holds the name, and its lease has not expired.
            StoreError: there is no run.
        """
        _check_consumer(consumer)
        await self._db.record_data.create_indexes(ledger_indexes(consumer))
        field = f"trainer_leases.{consumer}"
        free = {
            "$expr": {
                "$or": [
                    {"$lt": [{"$ifNull": [f"${field}.expires_at", None]}, "$$NOW"]},
                    {"$eq": [f"${field}.owner", {"$literal": owner}]},
                ]
            }
        }
        # The token grows with every acquisition and survives release, so two successive holders
        # never filter their writes on the same token.
        fence = {"$add": [{"$ifNull": [f"${field}.fence", 0]}, 1]}
        since = {"since": "$$NOW", "release": literal(package_version())}
        document = await self._db.runs.find_one_and_update(
            free,
            [{"$set": {field: {**lease(owner, fence, lease_seconds), **since}}}],
            return_document=ReturnDocument.AFTER,
        )
        if document is not None:
            acquired = from_document(Run, document).trainer_leases[consumer]
            self._fences[consumer] = acquired.fence
            return acquired
        current = await self._db.runs.find_one()
        if current is None:
            raise self._db.no_run()
        holder = from_document(Run, current).trainer_leases[consumer]
        raise TrainerBusy(
            f"run {self._db.name!r} is already running: {holder.owner} trains it as {consumer!r}"
            f"{_since(holder)}; stop it, wait for its lease to expire "
            f"({holder.expires_at:%H:%M:%S} UTC), or choose another --run_name or --consumer"
        )

    @operation("renew the trainer's lease")
    async def renew(self, consumer: str, lease_seconds: float) -> None:
        """Extend the lease that this store object acquired.

        Raises:
            LeaseLost: another trainer took the name over.
        """
        await self._set_as_trainer(consumer, {_expiry(consumer): after(lease_seconds)})

    @operation("release the trainer's lease")
    async def release(self, consumer: str) -> None:
        """Expire the lease that this store object acquired, so the next trainer need not wait.

        Raises:
            LeaseLost: another trainer took the name over.
        """
        await self._set_as_trainer(consumer, {_expiry(consumer): {"$subtract": ["$$NOW", 1]}})

    @operation("store who has the device")
    async def set_has_device(self, has_device: bool) -> None:
        """Record whether the trainer, whose lease this store object acquired, has the device.

        Raises:
            LeaseLost: another trainer took the name over.
        """
        await self._set_as_trainer(DEFAULT_CONSUMER, {"trainer_has_device": has_device})

    @operation("read who has the device")
    async def holder_has_device(self) -> bool:
        """Return whether a trainer with a valid lease has the servers' device."""
        is_valid = {"$gt": [f"${_expiry(DEFAULT_CONSUMER)}", "$$NOW"]}
        found = await self._db.runs.find_one(
            {"trainer_has_device": True, "$expr": is_valid}, {"_id": 1}
        )
        return found is not None

    async def _set_as_trainer(self, consumer: str, changes: Document) -> None:
        # -1 matches no document: without an acquired lease, nothing may be changed.
        held = {f"trainer_leases.{consumer}.fence": self._fences.get(consumer, -1)}
        result = await self._db.runs.update_one(held, [{"$set": changes}])
        if result.matched_count == 0:
            raise await self._lost(consumer)

    async def check(self, consumer: str) -> None:
        """Refuse ledger writes of a trainer that was replaced while it was suspended.

        Raises:
            LeaseLost: another trainer took the name over.
        """
        fence = self._fences.get(consumer)
        if fence is None:
            return  # this store object holds no lease: a tool or a test edits the ledger
        # The lease and the ledger are different documents, so this check cannot be part of the
        # write. A trainer that is replaced between the two may still write once; its successor's
        # `reserve` then refuses those records or finds them reserved for the very same step.
        run = await self._db.runs.find_one({f"trainer_leases.{consumer}.fence": fence}, {"_id": 1})
        if run is None:
            raise await self._lost(consumer)

    async def _lost(self, consumer: str) -> LeaseLost:
        if consumer in self._fences and await self._db.runs.find_one({}, {"_id": 1}) is None:
            return self._db.run_dropped()
        return LeaseLost(f"the trainer lease {consumer!r} was taken over by another process")


def _since(holder: Lease) -> str:
    return "" if holder.since is None else f" since {holder.since:%Y-%m-%d %H:%M:%S} UTC"


def _expiry(consumer: str) -> str:
    return f"trainer_leases.{consumer}.expires_at"


def _check_consumer(consumer: str) -> None:
    if not consumer.isidentifier():
        raise ConfigError(f"trainer name {consumer!r} must be letters, digits and underscores")


def _with_change(by: str, before: Any, after: Any) -> Document:
    """Return the expression of the control log with one more entry."""
    entry = {"at": "$$NOW", "by": literal(by), "before": before, "after": after}
    log = {"$concatArrays": [{"$ifNull": ["$control_log", []]}, [entry]]}
    return {"$slice": [log, -LOG_LENGTH]}
