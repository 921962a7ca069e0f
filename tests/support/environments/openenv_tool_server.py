"""A small server of OpenEnv's whose actions are calls of a tool (arguments: port)."""

# mypy: ignore-errors

import random
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Guessing(MCPEnvironment):
    """Think of a number from 1 to 3; a right guess ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self.number, self.reward = 0, None
        tools = FastMCP("guessing")
        tools.tool(self.guess)
        super().__init__(tools)

    def guess(self, number: int) -> str:
        """Guess the number."""
        right = number == self.number
        self.reward = 1.0 if right else -0.25
        return "right" if right else "wrong"

    def reset(self, seed=None, episode_id=None, **_):
        """Think of a number."""
        self.number = random.Random(seed).randint(1, 3)
        return Observation(metadata={"hint": "1 to 3"})

    async def step_async(self, action, timeout_s=None, **more):
        """Reward a call."""
        self.reward = None
        seen = await super().step_async(action, timeout_s, **more)
        if isinstance(action, CallToolAction):
            seen.reward, seen.done = self.reward, self.reward == 1.0
        return seen

    def _step_impl(self, action, timeout_s=None, **_):
        raise NotImplementedError

    @property
    def state(self):
        """Nothing that a player may know."""
        return State()


uvicorn.run(
    create_fastapi_app(Guessing, CallToolAction, CallToolObservation, max_concurrent_envs=2),
    port=int(sys.argv[1]),
    log_level="warning",
)
