"""The examples of supervised fine-tuning and their order.

Conversations of a file, or scored records of a run, become `Example`s; a `Curriculum` assigns them to
steps, and `sft_batch` turns the examples of a step into micro-batches.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from agentrl.data import SelectedGroup, StepBatch, build_step
from agentrl.data.rows import Merge
from agentrl.data.shown_images import ImageBook, processor_key
from agentrl.data.tokens import TurnTokens, turn_tokens
from agentrl.errors import ConfigError, ImageError, RenderError
from agentrl.models.vision.image_reader import ImageReader
from agentrl.plugins.sft.demonstrations.demonstration import (
    demonstration_turns,
    read_demonstrations,
)
from agentrl.plugins.sft.learned import Lesson, lesson_of
from agentrl.renderers.renderer import Renderer
from agentrl.schema import DispatchedSamplingTask
from agentrl.schema.image import image_from_data_url
from agentrl.store import TrajectoryStore
from agentrl.trainer.rl.step_groups import RecordImages

_NOTHING = Lesson()


@dataclass(frozen=True, eq=False)
class Example:
    """One conversation in token form."""

    id: str
    turns: tuple[TurnTokens, ...]
    lesson: Lesson = _NOTHING
    """What its replies are."""

    @property
    def num_targets(self) -> int:
        """Number of tokens to learn."""
        return sum(turn.num_targets for turn in self.turns)


def file_examples(
    path: Path, renderer: Renderer, reader: ImageReader | None = None
) -> list[Example]:
    """Return the conversations of a file, rendered with the model's chat template.

    Args:
        path: see `read_demonstrations`.
        renderer: of the model.
        reader: reads images for it; None for a text-only model.
    """
    examples = []
    for demonstration in read_demonstrations(path):
        if any(message.get("tool_calls") for message in demonstration.messages):
            renderer.check_tools()
        try:
            turns = demonstration_turns(
                demonstration,
                renderer,
                record_id=f"{path.name}/{demonstration.id}",
                task_id=path.name,
            )
            images = _images_of(turns, reader)
        except (RenderError, ImageError) as error:
            raise ConfigError(f"{path}: {demonstration.source}: {error}") from error
        tokens = tuple(turn_tokens(turns, images))
        examples.append(Example(demonstration.id, tokens, lesson_of(turns, renderer.traits)))
    if not examples:
        raise ConfigError(f"{path}: the file has no conversations")
    return examples


def _images_of(turns: Sequence[DispatchedSamplingTask], reader: ImageReader | None) -> ImageBook:
    if reader is None:
        return ImageBook()
    images = {
        (url, processor_key(turn.image_processor)): reader.shown(
            image_from_data_url(url).data, turn.image_processor
        )
        for turn in turns
        for url in turn.added_images
    }
    return ImageBook(images, reader.token_id)


async def record_examples(
    store: TrajectoryStore, min_score: float, reader: ImageReader | None = None
) -> list[Example]:
    """Return the scored training records of a run, with their tokens as sampled.

    Args:
        store: the run's store.
        min_score: records with lower scores are skipped.
        reader: reads images for the model; None for a text-only model.
    """
    examples, images = [], RecordImages(store, reader)
    record = None
    async for record in store.records.find(status="scored", split="train"):
        if record.score is not None and record.score.value >= min_score:
            stored = await store.turns.of_record(record.id)
            turns = turn_tokens(stored, await images.book(stored))
            if turns:
                examples.append(Example(record.id, tuple(turns), lesson_of(stored)))
    if record is None:
        raise ConfigError(
            f"{store.redacted_uri} has no scored training record; name another run in --records_of"
        )
    if not examples:
        raise ConfigError(
            f"{store.redacted_uri} has no training record with a score of at least {min_score:g}; "
            "lower --min_score"
        )
    return examples


@dataclass(frozen=True)
class Curriculum:
    """The examples of every step: a pure function of the step, so a checkpoint stores no position."""

    num_examples: int
    examples_per_step: int
    num_epochs: int
    max_steps: int | None
    """Number of steps, however many epochs they take; None: as many as the epochs take."""
    seed: int | None
    """Seed of the order of each epoch; None keeps the given order."""

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        if self.max_steps is not None:
            return self.max_steps
        return -(-self.num_places // self.examples_per_step)

    @property
    def num_places(self) -> int:
        """How often an example is learned, all steps and examples together."""
        if self.max_steps is not None:
            return self.max_steps * self.examples_per_step
        return self.num_examples * self.num_epochs

    def num_epochs_after(self, step: int) -> float:
        """Return how often an example was learned on average after a step."""
        return min(step * self.examples_per_step, self.num_places) / self.num_examples

    def members(self, step: int) -> list[int]:
        """Return the examples of a step (from 1); the last step may have fewer."""
        first = (step - 1) * self.examples_per_step
        last = min(first + self.examples_per_step, self.num_places)
        return [self._example_at(position) for position in range(first, last)]

    def _example_at(self, position: int) -> int:
        epoch, index = divmod(position, self.num_examples)
        return self._order(epoch)[index]

    def _order(self, epoch: int) -> Sequence[int]:
        order = list(range(self.num_examples))
        if self.seed is not None:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order


def continued_example(example: Example, reply: Sequence[int], guess: Sequence[int]) -> Example:
    """Return an example whose targets are the tokens after the first prompt and a started reply.

    That is one for each token of a guess at how the reply continues, and one behind them.
    """
    turn, num_targets = example.turns[0], len(guess) + 1
    prompt = turn.full_ids[: turn.num_prompt_tokens]
    full_ids = np.concatenate([prompt, np.asarray([*reply, *guess, 0])]).astype(np.int32)
    asked = replace(
        turn,
        full_ids=full_ids,
        num_prompt_tokens=len(full_ids) - num_targets,
        behavior_logprobs=np.resize(turn.behavior_logprobs, num_targets),
        versions=np.resize(turn.versions, num_targets),
        routed_experts=None,
    )
    return Example(example.id, (asked,))


def sft_group(examples: Sequence[Example]) -> SelectedGroup:
    """Return examples as one group, whose conversations may share prefixes."""
    return SelectedGroup(
        task_id="sft",
        record_ids=tuple(example.id for example in examples),
        scores=(),
        turns=tuple(turn for example in examples for turn in example.turns),
    )


def sft_batch(
    examples: Sequence[Example],
    *,
    token_budget: int,
    num_ranks: int,
    by_token: bool = True,
    merge: Merge = "tree",
) -> StepBatch:
    """Return examples as micro-batches; shared prefixes of conversations are computed once."""
    return build_step(
        [sft_group(examples)],
        policy_version=0,
        token_budget=token_budget,
        reduction="token_mean" if by_token else "sequence_mean",
        num_ranks=num_ranks,
        merge=merge,
    )
