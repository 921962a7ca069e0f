"""`BranchPoint`: where a Record of a branching group leaves another Record of the group."""

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
