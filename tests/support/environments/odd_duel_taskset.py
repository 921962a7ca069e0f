"""Duels in which something goes wrong, each in its own way (`?way=`)."""

# mypy: ignore-errors

import contextlib

import verifiers.v1 as vf
from duel_taskset import DuelEnv, DuelTaskset


class OddConfig(vf.TasksetConfig):
    """What goes wrong."""

    way: str = ""


class OddDuelEnv(DuelEnv):
    """Left always bids; what becomes of right depends."""

    async def run(self, task, agents):
        """Play."""
        way = self.taskset.config.way
        if way != "left is silent":
            await agents.left.run(task)
        if way == "right fails":
            with contextlib.suppress(ValueError):
                async with agents.right.interaction(task) as right:
                    await right.turn()
                    raise ValueError("right left the table")
        elif way != "right is silent":
            await agents.right.run(task)

    async def finalize(self, task, episode):
        """Pay."""
        await super().finalize(task, episode)
        if self.taskset.config.way == "no number":
            episode.traces[0].record_reward("bid", float("nan"))

    def complete(self, episode):
        """Accept an episode that right spoiled."""
        return not episode.errors


class OddDuelTaskset(DuelTaskset, vf.Taskset[vf.Task[vf.TaskData], OddConfig]):
    """Odd duels."""


__all__ = ["OddDuelEnv", "OddDuelTaskset"]
