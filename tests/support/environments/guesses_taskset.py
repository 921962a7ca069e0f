"""A task set of verifiers' whose environment plays the user, and whose one seat is a player's."""

# mypy: ignore-errors

from collections.abc import Iterator

import verifiers.v1 as vf


class GuessEnvConfig(vf.EnvConfig):
    """One seat."""

    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    """Says whether a guess is right, until it is."""

    async def run(self, task, agents):
        """Play."""
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply.strip() != "2":
                segment = await interaction.turn("No.")
        interaction.trace.record_reward("game_reward", float(not segment.terminated))


class GuessTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """One game."""


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    """Games without end."""

    INFINITE = True

    def load(self) -> Iterator[GuessTask]:
        """Yield them."""
        while True:
            yield GuessTask(vf.TaskData(prompt="Guess from 1 to 3."), self.config.task)


__all__ = ["GuessEnv", "GuessTaskset"]
