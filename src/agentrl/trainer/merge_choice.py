"""`--merge auto`: per step, token trees or the same turns side by side, as the device computes faster.

A tree saves tokens, and its attention may cost more for each of them, by an amount that depends on the
device and on how the tree branches. Where few tokens are saved, the first step with such a tree times
both ways on a part of itself, once in a run.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from agentrl.config.sections import TrainerSection
from agentrl.data import SelectedGroup, StepBatch, StepStats, build_step
from agentrl.data.rows import Merge, TokenTree
from agentrl.data.tokens import TurnTokens
from agentrl.trainer.bootstrap import WorkerGroup
from agentrl.trainer.metrics.history import History

logger = logging.getLogger(__name__)

ENOUGH_SAVED = 4.0
"""Ratio of unmerged to merged tokens from which trees are used untimed. Trees of random bits, which
branch at almost every token, were slower on a CPU at 2.9, and faster at 6.3."""
_MARGIN = 1.05
"""Ratio of seconds below which the difference may be noise, and trees are kept."""


def way_to_start(trainer: TrainerSection) -> Merge:
    """Return how prefixes are shared before anything is timed."""
    return "tree" if trainer.merge == "auto" else trainer.merge


def faster_way(seconds: dict[str, float]) -> Merge:
    """Return how to compute a step whose tree saves few tokens.

    Args:
        seconds: of the sample, `merged` and `unmerged`.
    """
    return "packed" if seconds["merged"] > _MARGIN * seconds["unmerged"] else "tree"


def is_worth_timing(stats: StepStats) -> bool:
    """Return whether merging saves tokens, but few."""
    return stats.tokens_packed < stats.tokens_flat < ENOUGH_SAVED * stats.tokens_packed


def timed_sample(groups: Sequence[SelectedGroup], max_tokens: int) -> list[SelectedGroup]:
    """Return the first turns of a step, in the order of its trees, of at most `max_tokens` unmerged.

    Turns that are longer than what is left are passed over.
    """
    sample = []
    for group in groups:
        turns: list[TurnTokens] = []
        for branch in TokenTree.from_tokens(group.turns).branches if group.usable else ():
            for turn in branch.turns:
                if len(turn.path) <= max_tokens:
                    turns.append(turn)
                    max_tokens -= len(turn.path)
        sample.append(replace(group, turns=tuple(turns)))
    return sample


class MergeChoice:
    """Chooses how prefixes are shared, step by step."""

    def __init__(self, trainer: TrainerSection, group: WorkerGroup, history: History) -> None:
        """Continue with what the run has measured before.

        Args:
            trainer: its flags, with `none` for models that are inexact on trees.
            group: the ranks, which are timed.
            history: keeps the measured seconds.
        """
        self._max_tokens = trainer.max_tokens
        self._group = group
        self._history = history
        # Two runs may measure differently, and the two ways round differently.
        self._is_open = trainer.merge == "auto" and not trainer.full_determinism
        self.first = way_to_start(trainer)
        """The way without timing."""
        self.timed: dict[str, float] = {}
        """Seconds that were measured in the last step, `merged` and `unmerged`."""

    async def chosen(
        self,
        batch: StepBatch,
        groups: Sequence[SelectedGroup],
        build: Callable[[Merge], StepBatch],
        seconds: dict[str, float],
    ) -> StepBatch:
        """Return the batch of a step in the way that is faster.

        Args:
            batch: built in the way `first`.
            groups: of the step.
            build: builds it in a given way.
            seconds: wall time of the step by phase; timing is added.
        """
        self.timed = {}
        if not self._is_open or not is_worth_timing(batch.stats):
            return batch
        if not self._history.merge_seconds:
            with self._history.timed("time_merge", seconds):
                await self._measure(groups)
        measured = self._history.merge_seconds
        if not measured or faster_way(measured) == batch.stats.merge:
            return batch
        return await asyncio.to_thread(build, faster_way(measured))

    async def _measure(self, groups: Sequence[SelectedGroup]) -> None:
        ways: tuple[Merge, Merge] = ("tree", "packed")
        merged, unmerged = await asyncio.to_thread(
            lambda: [self._sample(groups, merge) for merge in ways]
        )
        if not is_worth_timing(merged.stats):
            return  # the part of the step that is small enough shares nothing
        times = await self._group.time_packings(merged.micro_batches, unmerged.micro_batches)
        self.timed = dict(zip(("merged", "unmerged"), times, strict=True))
        self._history.merge_seconds = self.timed
        logger.info(
            "merge: merged %.3g s, unmerged %.3g s for %s tokens: %s",
            *times,
            f"{unmerged.stats.tokens_flat:,}",
            "merged" if faster_way(self.timed) == "tree" else "unmerged",
        )

    def _sample(self, groups: Sequence[SelectedGroup], merge: Merge) -> StepBatch:
        return build_step(
            timed_sample(groups, self._max_tokens * self._group.dp_size),
            policy_version=0,
            token_budget=self._max_tokens,
            merge=merge,
            num_ranks=self._group.dp_size,
            attention_cost=self._group.attention_cost,
        )
