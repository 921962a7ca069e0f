"""Versions that were lost with their checkpoints: the run resumed from an older one.

    version   0 ── 1 ── 2 ── 3 ── 4      lost: weights of versions 3 and 4
                        └── 3'── 4'      the run, which resumed after step 2

A policy version is a number of optimizer steps, so the resumed run gives the numbers of the lost
versions to other weights. A lost version 4 is two steps away from version 2, just as version 0 is,
and it counts as old as that.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime

from agentrl.schema.base import Value
from agentrl.schema.training import DBRecordData
from agentrl.schema.turn import DispatchedSamplingTask


class LostVersions(Value):
    """The versions that one start from an older checkpoint left behind."""

    after: int
    """The version from which the run resumed; later ones of that time are lost."""
    last: int
    """The last version that was published."""
    until: datetime | None = None
    """When the servers had the resumed version; None before. A turn that began earlier may have been
    sampled by lost versions."""

    def age_of(self, version: int) -> int:
        """Return the version of the run that is as many steps away as a lost one; below 0: older."""
        if version <= self.after:
            return version
        aged = 2 * self.after - version
        return aged if aged >= 0 else aged - 1  # -1 stands for an unknown version


def counted_as_old(data: DBRecordData, lost: Sequence[LostVersions]) -> DBRecordData:
    """Return a record whose turns have the age of their weights, not the numbers of lost versions.

    Args:
        data: a record with its turns.
        lost: the lost versions of the run, oldest first.
    """
    turns = tuple(_aged(turn, lost) for turn in data.turns)
    if all(one is old for one, old in zip(turns, data.turns, strict=True)):
        return data
    spans = [span for turn in turns if turn.trainable for span in turn.version_spans]
    versions = [span.version for span in spans]
    bounds = {"min_version": min(versions), "max_version": max(versions)} if versions else {}
    return data.model_copy(update={"turns": turns, **bounds})


def _aged(turn: DispatchedSamplingTask, lost: Iterable[LostVersions]) -> DispatchedSamplingTask:
    spans = turn.version_spans
    for one in lost:
        if one.until is None or turn.started_at <= one.until:
            spans = tuple(
                span.model_copy(update={"version": one.age_of(span.version)}) for span in spans
            )
    return turn if spans == turn.version_spans else turn.model_copy(update={"version_spans": spans})
