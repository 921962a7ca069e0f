"""A small server of OpenEnv's: guess a number, rewarded at each guess (arguments: port, sessions)."""

# mypy: ignore-errors

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """A guess."""

    number: int


class Hint(Observation):
    """What is known of the number."""

    hint: str = ""


class Guessing(Environment):
    """Think of a number from 1 to 3; a right guess ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.number = 0

    def reset(self, seed=None, episode_id=None, **_):
        """Think of a number."""
        self.number = random.Random(seed).randint(1, 3)
        return Hint(hint="1 to 3")

    def step(self, action, timeout_s=None, **_):
        """Judge a guess."""
        if action.number == 13:
            raise OSError("the disk is full")
        right = action.number == self.number
        return Hint(hint="right" if right else "wrong", done=right, reward=1.0 if right else -0.25)

    @property
    def state(self):
        """Nothing that a player may know."""
        return State()


uvicorn.run(
    create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=int(sys.argv[2])),
    port=int(sys.argv[1]),
    log_level="warning",
)
