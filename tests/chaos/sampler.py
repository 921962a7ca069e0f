"""A sampler (or scorer) process as `agentrl sample` starts it, with every acknowledgement noted.

`main([JOURNAL, "--flag=value", ...])` is the whole process.
"""

import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from chaos.journal import Journal

from agentrl.config.loading import parse_flags
from agentrl.rollout.worker.sampler_process import run_sampler
from agentrl.runtime.logs import setup_logging
from agentrl.schema import DispatchedSamplingTask
from agentrl.store import TrajectoryStore

Method = Callable[..., Awaitable[Any]]


def digest(turn: DispatchedSamplingTask) -> str:
    """Return a digest of what was sampled."""
    parts = (turn.added_ids.tobytes(), turn.output_ids.tobytes(), turn.output_logprobs.tobytes())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def note_acknowledgements(journal: Journal) -> None:
    """Have the store's writes noted, once they are acknowledged."""

    def claiming(method: Method) -> Method:
        async def noted(self: TrajectoryStore, owner: str, *args: Any, **options: Any) -> Any:
            claimed = await method(self, owner, *args, **options)
            if claimed is not None:
                journal.write("claim", record=claimed[0].id, fence=claimed[0].fence, owner=owner)
            return claimed

        return noted

    def writing(kind: str, method: Method) -> Method:
        async def noted(
            self: TrajectoryStore, record_id: str, fence: int, *a: Any, **o: Any
        ) -> Any:
            begun = time.monotonic()
            result = await method(self, record_id, fence, *a, **o)
            journal.write(kind, record=record_id, fence=fence, begun=begun)
            return result

        return noted

    append = TrajectoryStore.append_turn

    async def append_turn(self: TrajectoryStore, turn: DispatchedSamplingTask, fence: int) -> None:
        begun = time.monotonic()
        await append(self, turn, fence)
        facts = {"record": turn.record_id, "fence": fence, "attempt": turn.attempt, "begun": begun}
        journal.write("turn", id=turn.id, digest=digest(turn), **facts)

    store: Any = TrajectoryStore
    store.append_turn = append_turn
    store.claim_record = claiming(TrajectoryStore.claim_record)
    store.claim_scoring = claiming(TrajectoryStore.claim_scoring)
    for name in ("finish_rollout", "set_score", "release", "fail_attempt"):
        setattr(store, name, writing(name, getattr(TrajectoryStore, name)))


def main(argv: Sequence[str]) -> int:
    """Sample, or score."""
    journal, *flags = argv
    setup_logging("sampler")
    note_acknowledgements(Journal(Path(journal)))
    return run_sampler(parse_flags(flags))
