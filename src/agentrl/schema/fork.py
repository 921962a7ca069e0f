"""`Fork`: a continuation from a turn of a Record, with other weights, messages or sampling."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pydantic import Field

from agentrl.errors import ConfigError
from agentrl.schema.base import Message, Value, utc_now
from agentrl.schema.image import content_with_images
from agentrl.schema.turn import CONTINUING, DispatchedSamplingTask, ToolResult


class Fork(Value):
    """Where its rollouts branch off a Record, and how they differ.

    Its Task, Records and turns are in separate collections, which training, evaluations and counts
    ignore. Every rollout has a copy of the turns before the fork, so it can be read without
    its parent.
    """

    id: str
    """`fork:{parent record id}@{turn}-{random}`, which is the id of its Task as well."""
    record_id: str
    """The parent: a Record, or a rollout of another fork."""
    attempt: int
    """The parent's attempt whose turns it continues."""
    task_id: str
    """The question with whose rollouts those of the fork are displayed."""
    turn: int
    """First turn that is sampled again; earlier turns are the parent's."""
    version: int
    """Policy version requested for the rollouts."""
    messages: tuple[Message, ...] | None = None
    """Messages shown to turn `turn` after the preceding turn; None: those that the parent was shown."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Overridden sampling parameters; the others are those of the parent's turn."""
    created_by: str = ""
    created_at: datetime = Field(default_factory=utc_now)


def check_fork_turn(turns: Sequence[DispatchedSamplingTask], turn: int) -> None:
    """Check that a fork may start at a turn.

    Raises:
        ConfigError: there is no such turn, or it is a call of another model.
    """
    if not turns:
        raise ConfigError("the record has no turns yet")
    if not 0 <= turn < len(turns):
        raise ConfigError(f"--turn {turn}: the record has turns 0 to {len(turns) - 1}")
    if not turns[turn].trainable:
        raise ConfigError(f"--turn {turn} is a call of {turns[turn].model or 'another model'}")


def shown_before(turns: Sequence[DispatchedSamplingTask], index: int) -> list[Message]:
    """Return the messages that turn `index` was shown since the turn that it continues."""
    turn = turns[index]
    results: Sequence[ToolResult] = ()
    if turn.parent is not None and turn.branch_reason in CONTINUING:
        results = turns[turn.parent].tool_results
    return [*map(result_message, results), *turn.added_messages]


def result_message(result: ToolResult) -> Message:
    """Return a tool result as the message that shows it."""
    return {
        "role": "tool",
        "tool_call_id": result.call_id,
        "name": result.name,
        "content": content_with_images(result.content, result.images),
    }
