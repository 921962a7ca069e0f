"""What the trainer reads (`DBRecordData`) and writes (`LedgerEntry`, `TurnTraining`, `Policy`)."""

from datetime import datetime
from typing import Final, Literal

from pydantic import Field

from agentrl.schema.base import Value, utc_now
from agentrl.schema.branch import BranchPoint, TurnWorth
from agentrl.schema.record import Outcome
from agentrl.schema.score import Score
from agentrl.schema.task import Split
from agentrl.schema.turn import DispatchedSamplingTask

LedgerStatus = Literal["ready", "reserved", "trained", "dropped"]
EQUAL_SCORES: Final = "zero_variance"
"""Reason for dropping the records of a group without a gradient."""


class LedgerEntry(Value):
    """Standing of one DBRecordData with one consumer (trainer).

    ready ──reserve(s)──> reserved ──commit──> trained ──(reuse allowed)──> reserved ...
      ^                   │ │  └──drop──> dropped
      │                   │ └──(reuse allowed)──reserve(s + n)──> reserved ...
      └─crash before commit
    """

    status: LedgerStatus = "ready"
    step: int | None = None
    """Optimizer step (from 1) that reserved, last trained or dropped the record."""
    trained_at: tuple[int, ...] = ()
    """Steps that trained the record, ascending: committed ones, and ones after which a further step
    reserved it."""
    trained_count: int = 0
    """Length of `trained_at`."""
    reason: str | None = None
    """Why the record was dropped (`stale`, `zero_variance`, ...)."""


class DBRecordData(Value):
    """The facts of one scored (or failed) Record in token form.

    The stored document holds references and counts; `turns` is filled in by the store when a
    trainer reads, so that tokens are kept once.
    """

    record_id: str
    task_id: str
    traj_id: int
    split: Split
    order: int
    attempt: int
    branch: BranchPoint | None = None
    """As in `Record`."""
    round: int = 0
    """Round of its group in which the Record was sampled, from 0; every round begins after the
    Records of the one before have ended."""
    outcome: Outcome | None
    score: Score | None
    """None for a Record that failed because of the infrastructure; it enters no baseline."""
    more_scores: tuple[Score, ...] = ()
    """As in `Record`."""
    turn_ids: tuple[str, ...]
    num_tokens: int
    """Distinct tokens over all turns: prompt and sampled, each counted once."""
    min_version: int | None
    max_version: int | None
    task_version: str = ""
    """Hash of the question's content (query, references, scorer) when its group completed."""
    group_completed: bool = False
    taught: dict[str, datetime] = Field(default_factory=dict)
    """Name of each teacher that has given its logprobs to all turns -> when."""
    created_at: datetime = Field(default_factory=utc_now)
    ledger: dict[str, LedgerEntry] = Field(default_factory=dict)
    expired_at: datetime | None = None
    """As in `Record`."""
    turns: tuple[DispatchedSamplingTask, ...] = ()

    @property
    def stored_turn_ids(self) -> tuple[str, ...]:
        """`turn_ids` while the turns are stored, then none."""
        return self.turn_ids if self.expired_at is None else ()


class RatioStats(Value):
    """Importance ratios (policy / behavior probability) over the sampled tokens of one turn."""

    mean: float
    std: float
    min: float
    max: float


TOKEN_USES = ("trained", "clipped", "ratio_out_of_range", "importance_correction")
"""Uses of a sampled token: in the loss, in the loss with a clipped gradient, or masked for a reason."""


class TokenTrainings(Value):
    """Per-token values of an optimizer step for the T sampled tokens of one turn."""

    log_ratios: bytes
    """float16 [T], log (policy / behavior probability)."""
    entropies: bytes
    """float16 [T], of the policy, in nats; empty without `--log_entropy`."""
    uses: bytes
    """uint8 [T], indices into `TOKEN_USES`."""


class TurnTraining(Value):
    """How one optimizer step of one trainer used one turn."""

    id: str
    """`{consumer}/{step}/{turn_id}`."""
    consumer: str
    step: int
    turn_id: str
    record_id: str
    task_id: str
    position: int | None = None
    """Position of the turn in the step's batch, from 0, so that a step can be rebuilt in its original
    order. None for a turn that was left out."""
    num_tokens: int
    """Sampled tokens of the turn."""
    num_trained_tokens: int
    """Sampled tokens that were part of the loss."""
    num_clipped_tokens: int = 0
    """Trained tokens whose gradient the clip range replaced."""
    masked: dict[str, int] = Field(default_factory=dict)
    """Reason for leaving tokens out (`stale`, `ratio_out_of_range`, ...) -> number of tokens."""
    advantage: float | None = None
    """None if the turn was left out before its advantage was computed."""
    worth: TurnWorth | None = None
    """None if no record of its group left another one, or the turn was left out."""
    staleness: int
    """Policy version that the step started from, minus the oldest version in the turn."""
    ratio: RatioStats | None = None
    """None if the turn did not go through the model."""
    tokens: TokenTrainings | None = None
    """Values of single tokens; only the pages that display them read this field."""


class Policy(Value):
    """A published set of weights."""

    version: int
    """Number of optimizer steps behind the weights; 0 is the start."""
    path: str
    adapter: str | None = None
    """Name of the adapter (LoRA) in `path` on the servers; None if `path` contains all weights."""
    checksum: str | None = None
    """SHA-256 over the weight files in name order; None until it is computed. Servers do not wait for
    it."""
    num_bytes: int
    """Size of the weight files; 0 until they are written."""
    is_written: bool = True
    """Whether the files exist; broadcast weights are written after they were published."""
    held_until: datetime | None = None
    """Until then servers may be reading the files, which are not deleted earlier."""
    created_at: datetime = Field(default_factory=utc_now)
