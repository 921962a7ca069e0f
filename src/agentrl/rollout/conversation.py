"""A growing conversation with the model, and how its next prompt follows from its last turn."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from agentrl.errors import RenderError
from agentrl.renderers.renderer import Renderer
from agentrl.schema import Message
from agentrl.schema.image import image_addresses


@dataclass(frozen=True)
class Prompt:
    """The prompt of one model call.

    Attributes:
        ids: the whole prompt, int32 [P].
        parent: index of the turn that it continues; None for a fresh context.
        shared_len: leading ids taken over from that turn's prompt and output.
        branch_reason: why it does not continue that turn in full, if it does not.
        rewritten: the context is another one than that turn's, and not that turn's and more.
        images: addresses of its images, one for each placeholder in `ids`.
        shared_images: leading ones taken over from that turn's prompt.
        num_begun: trailing ids that are the beginning of the reply: given, not sampled.
    """

    ids: np.ndarray
    parent: int | None
    shared_len: int
    branch_reason: str | None
    rewritten: bool = False
    images: tuple[str, ...] = ()
    shared_images: int = 0
    num_begun: int = 0

    @property
    def added_ids(self) -> np.ndarray:
        """The ids after the shared part, int32 [A]."""
        return self.ids[self.shared_len :]

    @property
    def added_images(self) -> tuple[str, ...]:
        """The images whose placeholders stand in the added ids."""
        return self.images[self.shared_images :]

    def beginning(self, ids: np.ndarray) -> "Prompt":
        """Return the prompt with the beginning of the reply behind it, int32 [B]."""
        whole = np.concatenate([self.ids, ids]).astype(np.int32)
        return replace(self, ids=whole, num_begun=len(ids))

    def reply_ids(self, output_ids: np.ndarray) -> np.ndarray:
        """Return the ids of the whole reply, int32 [num_begun + T]."""
        return np.concatenate([self.ids[len(self.ids) - self.num_begun :], output_ids])

    def showing(
        self, images: tuple[str, ...], before: tuple[str, ...], image_token_id: int | None
    ) -> "Prompt":
        """Return the prompt with its images, sharing nothing from the first that differs on.

        Where one image stands in another's place, the ids are the same and mean another thing.

        Args:
            images: addresses of its images, in the order of their placeholders.
            before: those of the prompt of the turn that it continues.
            image_token_id: the placeholder; None where the model has none.

        Raises:
            RenderError: there are more or fewer placeholders than images.
        """
        if not (images or before):
            return self
        places = np.flatnonzero(self.ids == (-1 if image_token_id is None else image_token_id))
        if len(places) != len(images):
            raise RenderError(
                f"the chat template writes {len(places)} placeholders for {len(images)} images"
            )
        shared_len, shared_images = self.shared_len, 0
        for place, mine, theirs in zip(places.tolist(), images, before, strict=False):
            if place >= shared_len:
                break
            if mine != theirs:
                shared_len = place
                break
            shared_images += 1
        return replace(self, shared_len=shared_len, images=images, shared_images=shared_images)


@dataclass
class Conversation:
    """Messages so far, and the token ids of the last turn.

    Append to `messages` through `add`; the model's own replies are added by
    `AsyncSampler.generate`. To edit the history (drop tool results, summarise), call `rewrite`: the
    next prompt then branches from the longest token prefix that is still shared.

    Images in messages are named by their stored addresses (`RolloutContext.images`).
    """

    messages: list[Message]
    tools: tuple[dict[str, Any], ...] = ()
    parent: int | None = None
    full_ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    pending: list[Message] = field(default_factory=list)
    branch_reason: str | None = None
    images: tuple[str, ...] = ()

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
        images = image_addresses(self.history)
        if self.parent is None:
            ids = renderer.render(self.pending, self.tools)
            prompt = Prompt(ids, None, 0, self.branch_reason)
            return prompt.showing(images, (), renderer.image_token_id)
        if self.branch_reason is None:
            bridge = renderer.bridge(self.full_ids, self.messages, self.pending, self.tools)
        else:
            bridge = renderer.branch(
                self.full_ids, self.pending, self.tools, reason=self.branch_reason
            )
        ids = bridge.prompt_ids(self.full_ids)
        prompt = Prompt(
            ids,
            self.parent,
            bridge.shared_len,
            bridge.reason,
            rewritten=self.branch_reason is not None,
        )
        return prompt.showing(images, self.images, renderer.image_token_id)

    def replied(self, turn: int, full_ids: np.ndarray, message: Message) -> None:
        """Take over the model's reply: turn `turn`, whose prompt and output are `full_ids`."""
        self.messages.extend(self.pending)
        self.images = image_addresses(self.messages)
        self.messages.append(message)
        self.pending = []
        self.parent = turn
        self.full_ids = full_ids
        self.branch_reason = None
