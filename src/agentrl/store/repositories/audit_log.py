"""The audit log: what people changed in a run.

Controls and forks are logged with the run and the fork themselves; all other changes are documents
of the collection `audit`.
"""

from collections.abc import Mapping
from typing import Any

from agentrl.runtime.processes.process_identity import this_user
from agentrl.schema import Fork, Run
from agentrl.schema.audit import AuditedAction, AuditEntry
from agentrl.store.database import Repository, operation
from agentrl.store.documents.codec import from_document, to_document


class AuditRepository(Repository):
    """Stores changes by people, and lists them."""

    @operation("log a change")
    async def add(
        self, what: AuditedAction, details: Mapping[str, Any], *, place: str = ""
    ) -> None:
        """Log a change that this process made for its user.

        Args:
            what: the change.
            details: what was changed, for display.
            place: where the user asked for it, if not in a command.
        """
        by = f"{this_user()} {place}".rstrip()
        at = await self._db.server_time()
        entry = AuditEntry(at=at, by=by, what=what, details=dict(details))
        await self._db.audit.replace_one({"_id": entry.id}, to_document(entry), upsert=True)

    @operation("read the audit log")
    async def all(self) -> list[AuditEntry]:
        """Return the changes, the oldest first; of controls, the last ones."""
        entries = [from_document(AuditEntry, one) async for one in self._db.audit.find()]
        entries += [_fork_entry(from_document(Fork, one)) async for one in self._db.forks.find()]
        run = await self._db.runs.find_one()
        if run is not None:
            for change in from_document(Run, run).control_log:
                details = {"before": change.before, "after": change.after}
                entries.append(
                    AuditEntry(at=change.at, by=change.by, what="control", details=details)
                )
        return sorted(entries, key=lambda one: one.at)


def _fork_entry(fork: Fork) -> AuditEntry:
    details = {"fork": fork.id, "record": fork.record_id}
    return AuditEntry(at=fork.created_at, by=fork.created_by, what="fork", details=details)
