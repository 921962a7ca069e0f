"""What a rollout needs to know of tools: their schemas, and how to call them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.schema import ToolResult


@dataclass(frozen=True)
class ToolSpec:
    """A tool as it is shown to the model."""

    name: str
    """Unique in its box; `server.tool` where two servers offer the same name."""
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    server: str
    remote_name: str
    """Name by which its server knows the tool."""
    repeatable: bool = False
    """The server declares the tool read-only or idempotent."""

    def openai(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form, as chat templates expect it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


class ToolBox(Protocol):
    """Tools that a rollout may call."""

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The tools on offer, in a fixed order."""
        ...

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, call_id: str = ""
    ) -> ToolResult:
        """Call a tool; bounded in time.

        What the model can do something about (an unknown name, bad arguments, an error that the
        tool reports, a call that takes too long) comes back as a result with `is_error`.

        Raises:
            ToolError: the infrastructure behind the tool failed.
        """
        ...
