"""Agents as data: what is written down of an agent, so that other processes can build it again.

A description is plain JSON without secrets.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

TOLD_BY_NAME = ("llm_model_name", "llm_api_key")
"""What an agent that is a function is told besides, if it has parameters of these names."""
DEFAULT_AGENT_CLASS = "aworld.agents.llm_agent:LLMAgent"


class _Described(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FunctionAgent(_Described):
    """A function `async (task, llm_base_url) -> answer`, or a class with `build_agents()`."""

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
    """What its `AgentConfig` says other than the defaults, the settings of its model left out."""
    llm: dict[str, Any] = {}
    """Settings of its model: of the trained one without what names the server."""
    trained: bool = True


class AWorldSwarm(_Described):
    """An AWorld swarm: its agents, and how they hang together."""

    kind: Literal["swarm"] = "swarm"
    name: str
    target: str
    members: tuple[AWorldAgent, ...]
    topology: list[Any]
    """As given to the swarm, with the number of a member in the place of each agent."""
    root: int | list[int] | None = None
    build_type: str
    max_steps: int = 0


AgentDescription = Annotated[FunctionAgent | AWorldAgent | AWorldSwarm, Field(discriminator="kind")]
_ADAPTER: TypeAdapter[AgentDescription] = TypeAdapter(AgentDescription)


def plays_alone(description: AgentDescription) -> bool:
    """Return whether a host plays one rollout of it at a time: AWorld's processes are not shared."""
    return description.kind != "function"


def parse_description(value: Mapping[str, Any]) -> AgentDescription:
    """Return the description in a JSON value."""
    return _ADAPTER.validate_python(value)
