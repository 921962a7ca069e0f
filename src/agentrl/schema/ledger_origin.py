"""`Retrain`: the origin of a ledger that repeats another trainer's steps (`agentrl retrain`)."""

from typing import Final

from agentrl.schema.base import Value

LEFT_OUT: Final = "left_out"
"""Reason for dropping a record that is taken back; its group is trained without it."""


class Retrain(Value):
    """What a trainer repeats."""

    run: str
    consumer: str
    """The trainer of the run whose steps are repeated."""
    checkpoint: int
    """Step of the checkpoint that it starts from; 0: the weights that the run began with."""
    last_step: int
    without: str = ""
    """The condition on the records that are left out; empty: none are."""

    def __str__(self) -> str:
        without = f"without {self.without}" if self.without else "with all records"
        return f"{self.run} after step {self.checkpoint}, {without}"
