"""Records that a trainer cannot use yet because a teacher's logprobs are missing."""

import asyncio

from agentrl.runtime.installation import typed_command
from agentrl.runtime.printable import counted
from agentrl.runtime.processes.process_identity import is_dead
from agentrl.schema import ENDED_RUNS
from agentrl.schema.base import Value
from agentrl.store.database import RunDatabase
from agentrl.store.documents.codec import Document


class UntaughtRecords(Value):
    """The records that wait for one teacher."""

    run_name: str
    teacher: str
    num_records: int
    process: str | None = None
    """A live process of this teacher, `host:pid:random`."""

    def __str__(self) -> str:
        """Return the finding as one line, with what to do about it."""
        text = (
            f"no logprobs of teacher {self.teacher} yet for {counted(self.num_records, 'record')}"
        )
        if self.process is not None:
            return f"{text}: its process {self.process} is alive"
        command = typed_command("teach", self.run_name, "--teacher", f"{self.teacher}=MODEL")
        return f"{text}: no process of it is alive; start {command}"


async def read_untaught(database: RunDatabase, consumer: str) -> tuple[UntaughtRecords, ...]:
    """Return what the trainer `consumer` waits for, one teacher of `--teachers` after another.

    Only records of complete groups are counted, which it has not consumed; an ended run waits for none.
    """
    wanted = {"status": {"$nin": list(ENDED_RUNS)}}
    fields = {"config.teachers": 1, "teacher_processes": 1}
    run = await database.runs.find_one(wanted, fields) or {}
    names: list[str] = run.get("config", {}).get("teachers") or []
    if not names:
        return ()
    now = await database.server_time()
    processes: dict[str, list[Document]] = run.get("teacher_processes", {})
    alive = {
        name: lease["owner"]
        for name, leases in processes.items()
        for lease in leases
        if lease["expires_at"] > now and not is_dead(lease["owner"])
    }
    ready = {"split": "train", "group_completed": True, f"ledger.{consumer}.status": None}
    counts = await asyncio.gather(
        *(database.record_data.count_documents({**ready, f"taught.{name}": None}) for name in names)
    )
    return tuple(
        UntaughtRecords(
            run_name=database.name,
            teacher=name,
            num_records=count,
            process=alive.get(name),
        )
        for name, count in zip(names, counts, strict=True)
        if count
    )
