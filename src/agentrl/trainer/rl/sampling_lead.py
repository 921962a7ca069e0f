"""How far samplers may run ahead of the trainer.

Input: what each step found when it read its groups. Output: the number of groups that samplers may
have claimed. The freshness bound limits it; within the bound, samplers run no further ahead than
needed for the trainer not to wait. Reads and writes nothing.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.schema import Control

_STEPS_SEEN = 2
"""Steps in a row that leave groups over before samplers run less far ahead. What a pause of the trainer
piled up is used by the steps after it."""
_SPARE = 1.5
"""Complete groups that a step should leave over, in square roots of the groups that it takes."""
_WAIT_SHARE = 0.02
"""Share of the time between two steps from which a step counts as one that waited."""


@dataclass(frozen=True)
class Admission:
    """The inputs of the latest admission bound."""

    groups_consumed: int
    step: int
    control: Control
    lead: float = math.inf
    """Groups beyond those of the step that may be claimed, if the freshness bound allows it."""

    def bound(self, max_steps: int) -> int:
        """Return the number of groups that samplers may have claimed by now."""
        per_step = self.control.groups_per_step
        num_steps = min(self.control.max_staleness + 1, max_steps - self.step + 1)
        return self.groups_consumed + int(min(max(0, num_steps) * per_step, per_step + self.lead))


class SamplingLead:
    """How many groups samplers may claim beyond those of the current step.

    It begins at the freshness bound. Complete groups that steps leave over were sampled earlier than
    needed, and the lead falls by their number, but for a few that cover the chance in how many are
    complete. A step that waits raises it by its own groups. A change shows once the groups that were
    admitted before it are used; until then, the lead stays.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.groups = math.inf
        self._clock = clock
        self._read_at: float | None = None
        self._left: list[int] = []
        self._num_admitted_before = 0.0

    def note(
        self,
        *,
        num_taken: int,
        num_left: int,
        waited_seconds: float,
        groups_per_step: int,
        most: int,
    ) -> None:
        """Follow a step that has read its groups.

        Args:
            num_taken: groups that no earlier step took.
            num_left: complete groups that it did not take.
            waited_seconds: how long it waited for groups.
            groups_per_step: groups that a step takes.
            most: the lead that the freshness bound allows.
        """
        now, before = self._clock(), self._read_at
        self._read_at = now
        lead = self.groups = min(self.groups, most)
        if before is None:
            self._num_admitted_before = groups_per_step + lead
        self._num_admitted_before -= num_taken
        if before is None or self._num_admitted_before > 0:
            return
        if waited_seconds > _WAIT_SHARE * (now - before):
            lead = min(lead + groups_per_step, most)
            self._left.clear()
        else:
            self._left = [*self._left, num_left][-_STEPS_SEEN:]
        if len(self._left) == _STEPS_SEEN:
            spare = math.ceil(_SPARE * math.sqrt(groups_per_step))
            lead -= max(0, min(lead, min(self._left) - spare))
        if lead != self.groups:
            self._num_admitted_before = groups_per_step + max(lead, self.groups)
            self._left.clear()
            self.groups = lead
