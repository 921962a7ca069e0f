"""`BranchPoint`: where a Record leaves another one of its group. `TurnWorth`: what that showed."""

from agentrl.schema.base import Value


class BranchPoint(Value):
    """The turn of another Record of the same group from which a Record was sampled.

    The Record has copies of the earlier turns, so it can be read without its parent. They are
    trained with the Record that sampled them.
    """

    record_id: str
    """The parent: a Record of the same Task, which may be a branch itself."""
    attempt: int
    """The parent's attempt whose turns it continues."""
    turn: int
    """First turn that was sampled again, at least 1; earlier turns are copies."""
    rule: str
    """The rule that chose the turn."""
    reason: str = ""
    """What the rule saw there, for people."""


class TurnWorth(Value):
    """What the rollouts of a group that branches say about one turn.

    The worth of a state is the mean score of the rollouts through it, each with the probability
    with which chains would have reached it. Rewards of single turns are not part of it.
    """

    after: float
    """Worth of the state that the turn led to."""
    change: float
    """`after` minus the worth of the state before the turn: the question, for a first turn."""
    num_leaves: int
    """Scored rollouts that passed the turn."""
    is_decision: bool
    """Whether other rollouts tell the turn apart from its neighbors: the state before it was
    continued several times, or it was shared by several rollouts itself. Otherwise `change`
    belongs to a whole rollout that nothing left."""

    @property
    def before(self) -> float:
        """Worth of the state before the turn."""
        return self.after - self.change
