"""A task set of verifiers' whose environment has two seats that bid, and a referee who is no policy."""

# mypy: ignore-errors

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf


class DuelEnvConfig(vf.EnvConfig):
    """Three agents, of whom two may speak at once."""

    left: vf.AgentConfig = vf.AgentConfig()
    right: vf.AgentConfig = vf.AgentConfig()
    referee: vf.AgentConfig = vf.AgentConfig()
    max_concurrent_agents: int | None = None


def worth(bid: str) -> float:
    """Return the number that a bid is, or a number that other texts differ in."""
    return float(bid) if bid.isdecimal() else sum(map(ord, bid)) % 101 / 100


class DuelEnv(vf.Env[DuelEnvConfig]):
    """Left and right bid at once, left once more, and each earns what its last bid is worth."""

    async def setup(self, agents):
        """Make the referee a part of the world."""
        agents.referee.trainable = False

    async def run(self, task, agents):
        """Play."""

        def asked(who):
            prompt = f"{task.data.prompt_text} You are {who}."
            return type(task)(task.data.model_copy(update={"prompt": prompt}), task.config)

        async with (
            agents.left.interaction(asked("left")) as left,
            agents.right.interaction(asked("right")) as right,
        ):
            _, bid = await asyncio.gather(left.turn(), right.turn())
            await left.turn(f"Right bids {bid.last_reply}")
        await agents.referee.run(asked("the referee"))

    async def finalize(self, task, episode):
        """Pay."""
        for trace in episode.traces:
            if trace.agent.name != "referee":
                trace.record_reward("bid", worth(trace.last_reply))


class DuelTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """One duel."""


class DuelTaskset(vf.Taskset[DuelTask, vf.TasksetConfig]):
    """Duels without end."""

    INFINITE = True

    def load(self) -> Iterator[DuelTask]:
        """Yield them."""
        while True:
            yield DuelTask(vf.TaskData(prompt="Bid a number."), self.config.task)


__all__ = ["DuelEnv", "DuelTaskset"]
