"""Versions whose weights are lost: the run resumed from an earlier one. Their numbers are not given again.

    steps     0 ── 1 ── 2 ── 3 ── 4      lost: the weights of versions 3 and 4
                        └── 3 ── 4       the run, which resumed after step 2
    versions  0    1    2    5    6      of the run now

Without loss, a version is a number of optimizer steps. A lost version 4 is two steps away from version
2, just as version 0 is, and it counts as old as that.
"""

from collections.abc import Sequence

from agentrl.schema.base import Value
from agentrl.schema.training import DBRecordData
from agentrl.schema.turn import DispatchedSamplingTask


class LostVersions(Value):
    """The versions that one start from an earlier version left behind; those of a run do not overlap."""

    after: int
    """The version from which the run resumed."""
    last: int
    """The last version of lost weights."""


def version_of(step: int, lost: Sequence[LostVersions]) -> int:
    """Return the version of the weights after a step.

    Args:
        step: number of optimizer steps.
        lost: the lost versions of the run, oldest first.
    """
    version = step
    for one in lost:
        if version > one.after:
            version += one.last - one.after
    return version


def step_of(version: int, lost: Sequence[LostVersions]) -> int:
    """Return the step that made a version; of a lost one, the step that is as many steps away."""
    num_lost = 0
    for one in lost:
        if version > one.last:
            num_lost += one.last - one.after
        elif version > one.after:
            step = 2 * one.after - version - num_lost
            return step if step >= 0 else step - 1  # -1 stands for an unknown version
    return version - num_lost


def counted_in_steps(data: DBRecordData, lost: Sequence[LostVersions]) -> DBRecordData:
    """Return a record whose versions are steps, from which its age follows.

    Args:
        data: a record with its turns.
        lost: the lost versions of the run, oldest first.
    """
    if not lost:
        return data
    turns = tuple(_in_steps(turn, lost) for turn in data.turns)
    spans = [span for turn in turns if turn.trainable for span in turn.version_spans]
    steps = [span.version for span in spans]
    bounds = {"min_version": min(steps), "max_version": max(steps)} if steps else {}
    return data.model_copy(update={"turns": turns, **bounds})


def _in_steps(turn: DispatchedSamplingTask, lost: Sequence[LostVersions]) -> DispatchedSamplingTask:
    spans = tuple(
        span.model_copy(update={"version": step_of(span.version, lost)})
        for span in turn.version_spans
    )
    return turn.model_copy(update={"version_spans": spans})
