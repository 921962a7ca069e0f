"""A growing conversation with the model; derives the next prompt from an earlier turn.

Input: messages. Output: prompts as token ids. The caller adds messages in order, so the turn that
a prompt continues is known; `inference.dialects.continuation` infers it for clients that resend all
messages with every call. Independent of servers and documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from agentrl.errors import RenderError
from agentrl.renderers.incremental import PromptIncrement
from agentrl.renderers.renderer import Renderer
from agentrl.renderers.untrusted_text import Tools
from agentrl.schema import Message
from agentrl.schema.image import image_addresses


@dataclass(frozen=True)
class Prompt:
    """The prompt of one model call.

    Attributes:
        ids: the whole prompt, int32 [P].
        parent: index of the turn that it continues; None for a fresh context.
        shared_len: leading ids reused from that turn's prompt and output.
        branch_reason: why it does not continue that turn in full, if it does not.
        rewritten: the context was edited rather than only extended.
        images: addresses of its images, one for each placeholder in `ids`.
        shared_images: leading images reused from that turn's prompt.
        num_begun: trailing ids that start the reply: prefilled rather than sampled.
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
        """The images whose placeholders are among the added ids."""
        return self.images[self.shared_images :]

    def beginning(self, ids: np.ndarray) -> "Prompt":
        """Return the prompt with `ids`, int32 [B], added as the start of the reply."""
        extended = np.concatenate([self.ids, ids]).astype(np.int32)
        return replace(self, ids=extended, num_begun=len(ids))

    def reply_ids(self, output_ids: np.ndarray) -> np.ndarray:
        """Return the ids of the whole reply, int32 [num_begun + T]."""
        return np.concatenate([self.ids[len(self.ids) - self.num_begun :], output_ids])

    def showing(
        self, images: tuple[str, ...], parent_images: tuple[str, ...], image_token_id: int | None
    ) -> "Prompt":
        """Return the prompt with its images, sharing nothing from the first one that differs.

        A placeholder has the same ids for every image, so ids alone do not distinguish images.

        Args:
            images: addresses of its images, in the order of their placeholders.
            parent_images: those of the prompt of the turn that it continues.
            image_token_id: the placeholder; None if the model has none.

        Raises:
            RenderError: there are more or fewer placeholders than images.
        """
        if not (images or parent_images):
            return self
        positions = np.flatnonzero(self.ids == (-1 if image_token_id is None else image_token_id))
        if len(positions) != len(images):
            raise RenderError(
                f"the chat template writes {len(positions)} placeholders for {len(images)} images"
            )
        shared_len, shared_images = self.shared_len, 0
        for position, image, parent_image in zip(
            positions.tolist(), images, parent_images, strict=False
        ):
            if position >= shared_len:
                break
            if image != parent_image:
                shared_len = position
                break
            shared_images += 1
        return replace(self, shared_len=shared_len, images=images, shared_images=shared_images)


@dataclass(frozen=True, eq=False)
class AnsweredTurn:
    """A turn that a later prompt may build on.

    Attributes:
        index: of the turn.
        messages: its prompt's messages, and its reply as sampled.
        full_ids: prompt and output ids, int32 [F].
        images: addresses of the images of its prompt.
    """

    index: int
    messages: tuple[Message, ...]
    full_ids: np.ndarray
    images: tuple[str, ...] = ()

    def next_prompt(self, renderer: Renderer, added: Sequence[Message], tools: Tools) -> Prompt:
        """Return the prompt of this turn's conversation with messages added.

        Raises:
            RenderError: the chat template refuses them.
        """
        increment = renderer.extend_prompt(self.full_ids, self.messages, added, tools)
        return self._prompt(renderer, increment, [*self.messages, *added])

    def edited_prompt(
        self, renderer: Renderer, messages: Sequence[Message], tools: Tools, reason: str
    ) -> Prompt:
        """Return the prompt of another conversation, sharing the longest common prefix.

        Raises:
            RenderError: the chat template refuses it.
        """
        increment = renderer.branch_prompt(self.full_ids, messages, tools, reason=reason)
        return replace(self._prompt(renderer, increment, messages), rewritten=True)

    def _prompt(
        self, renderer: Renderer, increment: PromptIncrement, messages: Sequence[Message]
    ) -> Prompt:
        ids = increment.prompt_ids(self.full_ids)
        prompt = Prompt(ids, self.index, increment.shared_len, increment.reason)
        return prompt.showing(image_addresses(messages), self.images, renderer.image_token_id)


@dataclass
class Conversation:
    """Messages so far, and the turn that the next prompt builds on.

    Append messages with `add`; `AsyncSampler.generate` adds the model's replies. To edit the
    history (drop tool results, summarize), call `rewrite`: the next prompt then branches from the
    longest token prefix that is still shared.

    Attributes:
        messages: those that the model has seen, its replies included.
        tools: shown to the model, in OpenAI form.
        last_turn: the turn of the last reply; None before the first.
        pending: messages that the model has not seen yet.
        branch_reason: why the history was rewritten, if it was.

    Images in messages are named by their stored addresses (`RolloutContext.images`).
    """

    messages: list[Message]
    tools: tuple[dict[str, Any], ...] = ()
    last_turn: AnsweredTurn | None = None
    pending: list[Message] = field(default_factory=list)
    branch_reason: str | None = None

    def __post_init__(self) -> None:
        """Treat the first messages as not yet sent."""
        self.pending = list(self.messages)
        self.messages = []

    @property
    def history(self) -> list[Message]:
        """All messages, including those that the model has not seen yet."""
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
        """Return the ids of the last turn, as sampled, and of what was added since."""
        turn, reason = self.last_turn, self.branch_reason
        if turn is None:
            ids = renderer.render(self.pending, self.tools)
            prompt = Prompt(ids, None, 0, reason)
            return prompt.showing(image_addresses(self.pending), (), renderer.image_token_id)
        if reason is None:
            return turn.next_prompt(renderer, self.pending, self.tools)
        return turn.edited_prompt(renderer, self.pending, self.tools, reason)

    def replied(self, turn: int, full_ids: np.ndarray, message: Message) -> None:
        """Add the model's reply: turn `turn`, whose prompt and output are `full_ids`."""
        images = image_addresses(self.history)
        self.messages = [*self.history, message]
        self.pending = []
        self.last_turn = AnsweredTurn(turn, tuple(self.messages), full_ids, images)
        self.branch_reason = None
