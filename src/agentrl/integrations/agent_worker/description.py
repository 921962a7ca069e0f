"""Agents as data: what other processes need to build an agent again, and to run it in workers.

Descriptions are plain JSON without secrets.
"""

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from agentrl.errors import ConfigError
from agentrl.integrations.reward_functions import RewardFunction

UNNAMED = "swarm"
"""Name of swarms that were given none; AWorld generates one that begins with it."""
DEFAULT_AGENT_CLASS = "aworld.agents.llm_agent:LLMAgent"


class _Described(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FunctionAgent(_Described):
    """A function `async (task, endpoint) -> answer`, or a class with `build_agents()`."""

    kind: Literal["function", "loop"]
    name: str
    reference: str
    """`file.py:name` or `package.module:name`."""


class AWorldAgent(_Described):
    """The constructor arguments of one AWorld agent."""

    kind: Literal["agent"] = "agent"
    name: str
    agent_id: str = ""
    """The agent's own id where others call it by it; empty: a new one for every rollout."""
    target: str = DEFAULT_AGENT_CLASS
    arguments: dict[str, Any] = {}
    """JSON arguments of the constructor."""
    references: dict[str, str] = {}
    """Arguments that are functions, by reference; those that are objects without state, by that of
    their class with `()` behind it."""
    conf: dict[str, Any] = {}
    """Values of its `AgentConfig` that differ from the defaults, without the settings of its model."""
    llm: dict[str, Any] = {}
    """Settings of its model; those that name the server are left out for the trained model."""
    trained: bool = True


class SwarmShape(_Described):
    """How the agents of an AWorld swarm are connected."""

    name: str
    target: str
    topology: list[Any]
    """As given to the swarm, with the number of a member in place of each agent, a list in place of
    each tuple, `{"parallel": [...]}` in place of each list, and a shape in place of each swarm."""
    root: Any = None
    build_type: str
    max_steps: int = 0


class AWorldSwarm(SwarmShape):
    """An AWorld swarm: its agents, those of swarms inside of it too, and how they are connected."""

    kind: Literal["swarm"] = "swarm"
    members: tuple[AWorldAgent, ...]


AgentDescription = Annotated[FunctionAgent | AWorldAgent | AWorldSwarm, Field(discriminator="kind")]
_ADAPTER: TypeAdapter[AgentDescription] = TypeAdapter(AgentDescription)


class WorkerSettings(_Described):
    """What workers are started with; the contents of `agent_workers.json`."""

    python: str
    """The interpreter."""
    processes: int
    """Workers of one pool."""
    serial: bool
    """One rollout at a time in each. AWorld finds agents by their ids in a registry of the process,
    and at the end of a task it closes the tools of every agent that is there."""
    agent: dict[str, Any] | None
    reward: str | None
    """The reward function, by reference."""
    reward_form: str | None


def worker_settings(
    description: AgentDescription,
    processes: object,
    reward: RewardFunction | None = None,
) -> WorkerSettings:
    """Return the settings of workers that run an agent in this interpreter.

    Args:
        description: the agent.
        processes: `agent_processes` as the user gave it, or None.
        reward: a reward function that the workers call, too.

    Raises:
        ConfigError: `processes` is no whole number from 1.
    """
    serial = description.kind != "function"
    if processes is None:
        processes = 4 if serial else 1
    if not isinstance(processes, int) or processes < 1:
        raise ConfigError(
            f"config: agent_processes must be a whole number from 1, got {processes!r}"
        )
    return WorkerSettings(
        python=sys.executable,
        processes=processes,
        serial=serial,
        agent=description.model_dump(mode="json"),
        reward=None if reward is None else reward.reference,
        reward_form=None if reward is None else reward.form,
    )


def write_worker_settings(settings: WorkerSettings, path: Path) -> None:
    """Write settings for `AgentWorkerPool.load`."""
    text = json.dumps(settings.model_dump(mode="json"), indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def check_can_run(description: AgentDescription) -> None:
    """Check that workers, which run in this interpreter, have what the agent needs.

    Raises:
        ConfigError: it is an agent of AWorld's, which is not installed here.
    """
    if description.kind in ("agent", "swarm") and importlib.util.find_spec("aworld") is None:
        raise ConfigError(
            f"agent: AWorld is not installed for {sys.executable}, which is to run it; make an "
            "environment with scripts/setup_agents aworld FOLDER, and run this with its Python"
        )


def parse_description(value: Mapping[str, Any]) -> AgentDescription:
    """Return the description in a JSON value."""
    return _ADAPTER.validate_python(value)
