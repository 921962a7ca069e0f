"""A sampler (or scorer) process as `agentrl sample` starts it, with every acknowledgement noted.

`main([JOURNAL, "--flag=value", ...])` is the whole process.
"""

import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

from chaos.journal import Journal

from agentrl.config.command_line import parse_flags
from agentrl.rollout.worker.sampler_process import run_sampler
from agentrl.runtime.logs import setup_logging
from agentrl.schema import BranchPoint, DispatchedSamplingTask
from agentrl.store.repositories.records import RecordRepository
from agentrl.store.repositories.scores import ScoreRepository
from agentrl.store.repositories.turns import TurnRepository

Method = Callable[..., Awaitable[Any]]


def digest(turn: DispatchedSamplingTask) -> str:
    """Return a digest of what was sampled."""
    parts = (turn.added_ids.tobytes(), turn.output_ids.tobytes(), turn.output_logprobs.tobytes())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def note_acknowledgements(journal: Journal) -> None:
    """Have the store's writes noted, once they are acknowledged."""

    def claiming(method: Method) -> Method:
        async def noted(self: object, owner: str, *args: Any, **options: Any) -> Any:
            claimed = await method(self, owner, *args, **options)
            if claimed is not None:
                journal.write("claim", record=claimed[0].id, fence=claimed[0].fence, owner=owner)
            return claimed

        return noted

    def writing(kind: str, method: Method) -> Method:
        async def noted(self: object, record_id: str, fence: int, *a: Any, **o: Any) -> Any:
            begun = time.monotonic()
            result = await method(self, record_id, fence, *a, **o)
            journal.write(kind, record=record_id, fence=fence, begun=begun)
            return result

        return noted

    append = TurnRepository.append

    async def append_turn(self: TurnRepository, turn: DispatchedSamplingTask, fence: int) -> None:
        begun = time.monotonic()
        await append(self, turn, fence)
        facts = {"record": turn.record_id, "fence": fence, "attempt": turn.attempt, "begun": begun}
        facts |= {
            "index": turn.index,
            "version": min((one.version for one in turn.version_spans), default=None),
        }
        journal.write("turn", id=turn.id, digest=digest(turn), **facts)

    turns, records, scores = (
        cast("Any", c) for c in (TurnRepository, RecordRepository, ScoreRepository)
    )
    turns.append = append_turn
    for repository in (records, scores):
        repository.claim = claiming(repository.claim)
    choose = records.choose_branch

    async def choose_branch(
        self: object, record_id: str, fence: int, point: BranchPoint | None, why_none: str = ""
    ) -> Any:
        begun = time.monotonic()
        result = await choose(self, record_id, fence, point, why_none)
        chosen = why_none if point is None else point.model_dump_json()
        journal.write("choose_branch", record=record_id, fence=fence, begun=begun, chosen=chosen)
        return result

    records.choose_branch = choose_branch
    records.finish = writing("finish_rollout", records.finish)
    scores.set = writing("set_score", scores.set)
    for name in ("release", "fail_attempt"):
        setattr(records, name, writing(name, getattr(records, name)))


def main(argv: Sequence[str]) -> int:
    """Sample, or score."""
    journal, *flags = argv
    setup_logging("sampler")
    note_acknowledgements(Journal(Path(journal)))
    return run_sampler(parse_flags(flags))
