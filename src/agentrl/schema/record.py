"""`Record`: one rollout of a Task. The Record document is also the claimable slot.

Lifecycle (`RECORD_TRANSITIONS` is enforced by the store's update filters):

    planned ──its round begins──> pending (only in groups that branch)

    pending ──claim──> running ──finish──> finished ──score──> scored
       ^                  │                   │  ^
       └──release/expire──┤                   │└─┘ scorer or judge away: claimed again
                          └──max_attempts──> failed ──rescore──> scored
                                              ^
                          finished ──defect───┘
"""

from datetime import datetime
from typing import Literal

from pydantic import Field

from agentrl.schema.base import Value, utc_now
from agentrl.schema.branch import BranchPoint
from agentrl.schema.score import Score, score_of
from agentrl.schema.task import Split

RecordStatus = Literal["planned", "pending", "running", "finished", "scored", "failed"]
RECORD_TRANSITIONS: dict[RecordStatus, frozenset[RecordStatus]] = {
    "planned": frozenset({"pending"}),
    "pending": frozenset({"running"}),
    "running": frozenset({"pending", "finished", "failed"}),
    "finished": frozenset({"scored", "failed"}),
    "scored": frozenset(),
    "failed": frozenset({"scored"}),
}
TERMINAL_STATUSES: frozenset[RecordStatus] = frozenset({"scored", "failed"})

Outcome = Literal[
    "answered",
    "no_answer",
    "turns_limit",
    "length_limit",
    "time_limit",
    "tool_calls_limit",
    "repetition",
    "agent_error",
]
"""How a rollout ended. Every outcome is caused by the policy and may be trained on; a failure of the
infrastructure ends the attempt without an outcome. `agent_error`: an agent's own code could not
continue with the policy's reply."""


class Lease(Value):
    """The right to write to a Record, with its expiry."""

    owner: str
    """`host:pid:random` of the holding process."""
    fence: int
    """Grows with every claim of the Record; every write of the holder filters on it."""
    expires_at: datetime
    since: datetime | None = None
    """When a trainer acquired it; not stored for Records, whose attempts contain it."""
    release: str = ""
    """The version of AgentRL of a trainer; not stored for Records."""


class Attempt(Value):
    """One holder's execution of a Record, kept after its end.

    An attempt that another sampler resumed at its last durable turn has several of these, with the
    same `attempt` and different `fence`s.
    """

    attempt: int
    fence: int
    owner: str
    first_turn: int = 0
    """Turns inherited from the previous holder, which died or released the Record (0: started
    over)."""
    started_at: datetime
    ended_at: datetime | None = None
    ended_by: Literal["finished", "expired", "released", "error"] | None = None
    error: str | None = None


class Record(Value):
    """One rollout of a Task: its lease while it runs, its result afterwards."""

    id: str
    """`{task_id}/{traj_id}`."""
    task_id: str
    split: Split
    traj_id: int
    """Index of the rollout in its group, from 0."""
    order: int
    """The Task's order; slots are claimed in ascending (order, traj_id)."""
    round: int = 0
    """Round of its group in which it is sampled: claimable once all earlier rounds have ended."""
    branch: BranchPoint | None = None
    """Where it leaves another Record of its group; None for a rollout from the start."""
    no_branch: str = ""
    """Why a rollout of a later round starts at the question; empty until that is decided."""
    status: RecordStatus = "pending"
    attempt: int = 0
    """Attempts started so far; 0 before the first claim."""
    fence: int = 0
    """Claims so far; the current lease carries this number."""
    lease: Lease | None = None
    resumable: bool = False
    """The current attempt's tools keep no state: another sampler may resume it at its last durable
    turn."""
    attempts: tuple[Attempt, ...] = ()
    turns: tuple[str, ...] = ()
    """Ids of the current attempt's acknowledged turns (`DispatchedSamplingTask.id`), in order."""
    outcome: Outcome | None = None
    final_answer: str | None = None
    reward: float | None = None
    """The reward returned by the agent or environment, from which the score is computed."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Further figures that it handed over, by name."""
    score: Score | None = None
    """The current score. None means not yet scored, never 0."""
    more_scores: tuple[Score, ...] = ()
    """Scores that were computed later, one for each scorer and version (`agentrl store rescore`)."""
    num_prompt_tokens: int = 0
    """Tokens that came from outside the model over all turns, each counted once."""
    num_output_tokens: int = 0
    min_version: int | None = None
    max_version: int | None = None
    """Oldest and newest policy version that sampled a token of this Record."""
    num_tool_calls: int = 0
    tool_names: tuple[str, ...] = ()
    """Names of the tools that the current attempt called, in no particular order."""
    error: str | None = None
    """Why the Record is `failed`, or why its scoring was last postponed."""
    created_at: datetime = Field(default_factory=utc_now)
    started_at: datetime | None = None
    finished_at: datetime | None = None
    expired_at: datetime | None = None
    """When its turns were removed (`--retain_steps`); None while they are stored."""

    def score_of(self, scorer: str, version: str | None = None) -> Score | None:
        """Return this scorer's score; its newest one when no version is named."""
        return score_of((self.score, *self.more_scores), scorer, version)


def task_of_record(record_id: str) -> str:
    """Return the id of the Task that a Record is a rollout of."""
    return record_id.rpartition("/")[0]
