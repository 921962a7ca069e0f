"""A growing conversation with the model, and how its next prompt follows from its last turn."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl.renderers.renderer import Renderer
from agentrl.schema import Message


@dataclass(frozen=True)
class Prompt:
    """The prompt of one model call.

    Attributes:
        ids: the whole prompt, int32 [P].
        parent: index of the turn that it continues; None for a fresh context.
        shared_len: leading ids taken over from that turn's prompt and output.
        branch_reason: why it does not continue that turn in full, if it does not.
        rewritten: the context is another one than that turn's, and not that turn's and more.
    """

    ids: np.ndarray
    parent: int | None
    shared_len: int
    branch_reason: str | None
    rewritten: bool = False

    @property
    def added_ids(self) -> np.ndarray:
        """The ids after the shared part, int32 [A]."""
        return self.ids[self.shared_len :]


@dataclass
class Conversation:
    """Messages so far, and the token ids of the last turn.

    Append to `messages` through `add`; the model's own replies are added by
    `AsyncSampler.generate`. To edit the history (drop tool results, summarise), call `rewrite`: the
    next prompt then branches from the longest token prefix that is still shared.
    """

    messages: list[Message]
    tools: tuple[dict[str, Any], ...] = ()
    parent: int | None = None
    full_ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    pending: list[Message] = field(default_factory=list)
    branch_reason: str | None = None

    def __post_init__(self) -> None:
        """Treat the first messages as not yet sent."""
        self.pending = list(self.messages)
        self.messages = []

    @property
    def history(self) -> list[Message]:
        """All messages, those that the model has not seen yet included."""
        return [*self.messages, *self.pending]

    def add(self, *messages: Message) -> None:
        """Append messages that the model has not seen yet."""
        self.pending.extend(messages)

    def rewrite(self, messages: Sequence[Message], reason: str) -> None:
        """Replace the whole history; `reason` is stored with the next turn."""
        self.messages = []
        self.pending = list(messages)
        self.branch_reason = reason

    def next_prompt(self, renderer: Renderer) -> Prompt:
        """Render what was added since the last turn behind that turn's ids, as sampled."""
        if self.parent is None:
            ids = renderer.render(self.pending, self.tools)
            return Prompt(ids, None, 0, self.branch_reason)
        if self.branch_reason is None:
            bridge = renderer.bridge(self.full_ids, self.messages, self.pending, self.tools)
        else:
            bridge = renderer.branch(
                self.full_ids, self.pending, self.tools, reason=self.branch_reason
            )
        ids = bridge.prompt_ids(self.full_ids)
        rewritten = self.branch_reason is not None
        return Prompt(ids, self.parent, bridge.shared_len, bridge.reason, rewritten)

    def replied(self, turn: int, full_ids: np.ndarray, message: Message) -> None:
        """Take over the model's reply: turn `turn`, whose prompt and output are `full_ids`."""
        self.messages.extend(self.pending)
        self.messages.append(message)
        self.pending = []
        self.parent = turn
        self.full_ids = full_ids
        self.branch_reason = None
