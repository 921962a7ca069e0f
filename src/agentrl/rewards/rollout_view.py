"""What a scoring function sees of a rollout: the conversation, the calls, and the world it left.

A function is asked as often as it needs facts of the world: the first time it asks for one that is not
there yet, it ends with `NeedsWorld`, the fact is fetched where the tools are, and the function is called
again with the facts so far. So functions run in other processes without a channel back, and a stored
list of facts repeats a verdict after the world is gone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from agentrl.errors import ScorerDefect
from agentrl.schema import GroundTruth, ToolResult

MAX_FACTS = 256
"""Facts of the world that one verdict may ask for."""


class RolloutWorld(Protocol):
    """The tools of a rollout, before they are closed."""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool in the rollout's session."""

    async def folder(self) -> Path:
        """Return a copy of the directories of the rollout's tool servers.

        Raises:
            ScoringError: there is none, or it is too large.
        """


class NeedsWorld(Exception):
    """A scoring function asks for a fact that is not there yet.

    Attributes:
        request: `{"call": tool, "arguments": {..}}`, or `{"folder": True}`.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        self.request = request


@dataclass(frozen=True)
class CallSeen:
    """A tool call of the policy, and its result."""

    tool: str
    arguments: Mapping[str, Any]
    result: str
    is_error: bool
    turn: int
    seat: str = ""


@dataclass
class Rollout:
    """A rollout that has ended, for a scoring function that takes `rollout`.

    Attributes:
        outcome: `answered`, or the limit that ended it.
        messages: the conversation that ended last, in OpenAI's form; thinking is in
            `reasoning_content`.
        calls: all tool calls, in their order.
        seats: names of the seats that took part; empty if there is one.
        columns: the question's own columns.
        reward: what the agent or environment gave, if anything.
    """

    outcome: str
    messages: list[dict[str, Any]]
    calls: list[CallSeen] = field(default_factory=list)
    seats: tuple[str, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    reward: float | None = None
    _facts: list[dict[str, Any]] = field(default_factory=list, repr=False)
    _folder: Path | None = field(default=None, repr=False)
    _num_used: int = field(default=0, repr=False)
    _request: dict[str, Any] | None = field(default=None, repr=False)
    world: RolloutWorld | None = field(default=None, repr=False)
    """The rollout's tools, in the process that has them."""

    def to_json(self) -> dict[str, Any]:
        """Return the public fields, for `from_json`; a rollout read there has no world."""
        fields = ("outcome", "messages", "seats", "columns", "reward")
        own = {name: getattr(self, name) for name in fields}
        return own | {"calls": [vars(call) for call in self.calls]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Rollout":
        """Return the rollout of `to_json`."""
        calls = [CallSeen(**call) for call in fields["calls"]]
        return cls(**{**fields, "calls": calls, "seats": tuple(fields["seats"])})

    def __getstate__(self) -> dict[str, Any]:
        """Leave the tools behind, which no other process has."""
        return self.__dict__ | {"world": None}

    @property
    def folder(self) -> Path:
        """A copy of the directory of the rollout's `per_rollout` command, without links.

        With several such servers, it has a subfolder for each. Its content comes from the tools: treat
        it as untrusted.
        """
        if self._folder is None:
            self._ask({"folder": True})
        assert self._folder is not None
        return self._folder

    async def call(self, tool: str, /, **arguments: Any) -> ToolResult:
        """Call a tool in the rollout's session, after the policy's last turn.

        The call is stored with the score, and is no part of the policy's tokens.
        """
        request = {"call": tool, "arguments": arguments}
        if self._num_used == len(self._facts):
            self._ask(request)
        fact = self._facts[self._num_used]
        self._num_used += 1
        if {key: fact[key] for key in request} != request:
            text = (
                f"the scorer asks the rollout's tools {tool!r} where they were asked {fact['call']!r} "
                "before; a scorer must ask the same in the same order"
            )
            raise ScorerDefect(text, kind=text, is_certain=True)
        return ToolResult(
            call_id="scorer", name=tool, content=fact["result"], is_error=fact["is_error"]
        )

    def _ask(self, request: dict[str, Any]) -> None:
        # Noted as well: the function may catch exceptions of all kinds.
        self._request = request
        raise NeedsWorld(request)

    def check_facts(self) -> None:
        """Raise NeedsWorld if the function asked for a fact, whatever became of its exception."""
        if self._request is not None:
            raise NeedsWorld(self._request)

    def restarted(self) -> "Rollout":
        """Return the same for another call of the function."""
        return replace(self, _num_used=0, _request=None)

    @property
    def facts(self) -> list[dict[str, Any]]:
        """What the tools answered so far, as it is stored with a score."""
        return self._facts

    def recalling(self, facts: Sequence[Mapping[str, Any]]) -> "Rollout":
        """Return the rollout with the facts of an earlier verdict."""
        return replace(self.restarted(), _facts=[dict(fact) for fact in facts])

    async def informed(self, request: Mapping[str, Any]) -> "Rollout":
        """Return the rollout with one more fact of its world.

        Raises:
            ScorerDefect: the world is gone, or too much was asked of it.
        """
        world = self.world
        if world is None or len(self._facts) >= MAX_FACTS:
            asked = f"calls {request['call']!r}" if "call" in request else "reads the folder"
            reason = "which ended with the rollout" if world is None else "too often"
            text = f"the scorer {asked} of the rollout's tools, {reason}"
            raise ScorerDefect(text, kind=text, is_certain=True)
        if "folder" in request:
            return replace(self.restarted(), _folder=await world.folder())
        result = await world.call(request["call"], request["arguments"])
        fact = {**request, "result": result.content, "is_error": result.is_error}
        return replace(self.restarted(), _facts=[*self._facts, fact])


def answering_at_once(truth: GroundTruth) -> Rollout:
    """Return a rollout that gave the right answer without a call, to try a function with."""
    said = {"role": "user", "content": truth.query}
    told = {"role": "assistant", "content": str(truth)}
    return Rollout("answered", [said, told], columns=truth.columns)
