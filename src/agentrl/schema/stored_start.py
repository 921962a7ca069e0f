"""`StoredStart`: the turn of another run at which the rollouts of a Task start."""

from pydantic import field_serializer

from agentrl.schema.base import Value
from agentrl.schema.turn import DispatchedSamplingTask


class StoredStart(Value):
    """A state that an earlier run reached, with what leads there.

    The rollouts have copies of the turns before it as calls of another model: they are given, and
    never trained on. Without the earlier run's database, they are complete.
    """

    run: str
    record_id: str
    """The Record of that run, for people."""
    share_right: float
    """Right attempts among those of that run that went through the state."""
    turns: tuple[DispatchedSamplingTask, ...]
    """The turns before the state, and the one that is sampled again, of which only the prompt counts."""

    @field_serializer("turns", when_used="json")
    def _shown(self, turns: tuple[DispatchedSamplingTask, ...]) -> list[str]:
        """Show their ids; what they are is in every rollout."""
        return [turn.id for turn in turns]

    @property
    def turn(self) -> int:
        """Index of the first turn that is sampled, at least 1."""
        return len(self.turns) - 1
