"""Conversations with one model, token by token, as an agent framework holds them over HTTP.

For training engines that sample themselves. A framework sends the whole conversation with every
call; what it repeats is recognised, and only what it added is encoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.inference.dialects.messages import meaning
from agentrl.schema import Message


@dataclass
class Chain:
    """One growing sequence: what the model saw and said.

    Attributes:
        messages: the conversation, the model's replies included.
        ids: tokens of all of it.
        mask: for the tokens after the first prompt, 1 where the model sampled them.
        logprobs: as long as `mask`, 0 where nothing was sampled; None where the server gives none.
        versions: as long as `mask`, policy versions, -1 where nothing was sampled; empty where the
            server gives none.
        as_sampled: `messages` with the model's replies as its chat template has them; empty where
            the engine does the rendering.
    """

    messages: list[Message]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    versions: list[int] = field(default_factory=list)
    as_sampled: list[Message] = field(default_factory=list)
    num_replies: int = 0
    busy: bool = False

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the model sampled."""
        return sum(self.mask)


class Chains:
    """All sequences of one rollout."""

    def __init__(self) -> None:
        self._chains: list[Chain] = []

    def take(self, messages: Sequence[Message]) -> Chain:
        """Return the longest chain that these messages continue, or a new one without tokens.

        A chain whose next reply is being sampled is not continued by anything else.
        """
        wanted = [meaning(message) for message in messages]
        best = None
        for chain in self._chains:
            known = [meaning(message) for message in chain.messages]
            longer = best is None or len(known) > len(best.messages)
            if not chain.busy and wanted[: len(known)] == known and longer:
                best = chain
        if best is None:
            best = Chain([])
            self._chains.append(best)
        best.busy = True
        return best

    def sampled(self) -> list[Chain]:
        """Return the chains in which anything was sampled."""
        return [chain for chain in self._chains if chain.num_sampled]

    def longest(self) -> Chain | None:
        """Return the chain with the most sampled tokens, if anything was sampled."""
        return max(self.sampled(), key=lambda chain: chain.num_sampled, default=None)
