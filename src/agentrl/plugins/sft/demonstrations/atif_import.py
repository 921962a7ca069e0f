"""Harbor's trajectories (ATIF) into an empty database.

Input: untrusted files. Output: a Task for each question, a Record for each
document, a turn for each step of the policy, through the same writes as a rollout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import ConfigError, StoreError
from agentrl.plugins.sft.demonstrations.atif_attempts import AtifAttempt, attempts_by_task
from agentrl.schema import Run
from agentrl.store import TrajectoryStore

_OWNER = "importer"
_LEASE_SECONDS = 60.0
NO_SCORE = "imported without a score"


@dataclass
class ImportCounts:
    """Result of an import."""

    num_tasks: int = 0
    num_records: int = 0
    num_turns: int = 0
    num_scored: int = 0
    num_trainable_turns: int = 0


async def import_trajectories(
    store: TrajectoryStore, path: Path, *, score: float | None = None
) -> ImportCounts:
    """Read trajectories that `check_trajectories` accepts into this database, which must be empty.

    Args:
        store: the database.
        path: a file or a folder; see `read_trajectories`.
        score: score of trajectories that have none.

    Raises:
        ConfigError: the database holds a run.
        DatasetError: a trajectory is malformed.
        StoreError: the store failed.

    If it fails, all written documents are deleted.
    """
    if await store.runs.get() is not None:
        raise ConfigError(f"{store.redacted_uri} contains a run; import under another --run_name")
    await store.ensure_schema()
    await store.runs.create(Run(name=store.database_name))
    counts = ImportCounts()
    try:
        for number, (task_id, attempts) in enumerate(attempts_by_task(path)):
            await _write_group(store, task_id, number, attempts, score, counts)
    except BaseException:  # also on Ctrl-C: a partial run would look complete
        await store.drop_database()
        raise
    return counts


async def _write_group(
    store: TrajectoryStore,
    task_id: str,
    number: int,
    attempts: Sequence[AtifAttempt],
    score: float | None,
    counts: ImportCounts,
) -> None:
    await store.tasks.add([attempts[0].task(task_id, number, len(attempts))])
    counts.num_tasks += 1
    for attempt in attempts:
        claimed = await store.records.claim(
            _OWNER, lease_seconds=_LEASE_SECONDS, admitted_groups=number + 1, max_attempts=1
        )
        if claimed is None or claimed[1].id != task_id:
            raise StoreError("another process is claiming the slots of this database")
        record = claimed[0]
        turns = attempt.turns(record.id, task_id, record.fence)
        for turn in turns:
            await store.turns.append(turn, record.fence)
        await store.records.finish(
            record.id,
            record.fence,
            outcome=attempt.outcome(),
            final_answer=attempt.answer(),
            lease_seconds=_LEASE_SECONDS,
        )
        given = attempt.score(score)
        if given is None:
            await store.scores.fail(record.id, record.fence, NO_SCORE)
        else:
            await store.scores.set(record.id, record.fence, given)
            counts.num_scored += 1
        counts.num_records += 1
        counts.num_turns += len(turns)
        counts.num_trainable_turns += sum(turn.trainable for turn in turns)
