"""TRL's rollout function: new weights to the servers, questions to the samplers, tokens to TRL.

TRL supports prompts and completions but no trees, so it receives each rollout as one sequence.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from agentrl.data.tokens import TurnTokens, turn_tokens
from agentrl.datasets.question import Question
from agentrl.datasets.task_stream import tasks_from_questions
from agentrl.errors import TrainingError
from agentrl.inference.weight_sync import PolicyPublisher
from agentrl.runtime.atomic_directory import atomic_directory
from agentrl.runtime.processes.signals import stopped_within
from agentrl.schema import DBRecordData, DispatchedSamplingTask
from agentrl.schema.task import id_of_task
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore

_POLL_SECONDS = 0.1


@dataclass(frozen=True, eq=False)
class RolloutSequence:
    """A conversation as sampled: P tokens of its first prompt and C tokens after it."""

    prompt_ids: np.ndarray
    """int32 [P]."""
    completion_ids: np.ndarray
    """int32 [C], the model's replies and the tokens given between them."""
    mask: np.ndarray
    """bool [C], True for tokens with loss."""
    logprobs: np.ndarray
    """float32 [C], at sampling time and after temperature; 0 for tokens that were not sampled."""

    @property
    def num_sampled(self) -> int:
        """Number of tokens with loss."""
        return int(self.mask.sum())


ScoredSequence = tuple[RolloutSequence, float | None]
"""A rollout and its score; None if the infrastructure failed."""


class RolloutFunction:
    """Samples the batches that TRL trains on.

    TRL calls it in its own thread; the store is used in the event loop that created this object.

    TRL's batch has a row for every rollout. The row of a rollout that failed `max_attempts` times
    holds one token without loss and no reward; TRL leaves it out of the group's mean.

    Attributes:
        reward_means: mean score of every batch.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        publisher: PolicyPublisher,
        questions: Sequence[Question],
        num_generations: int,
    ) -> None:
        self.reward_means: list[float] = []
        self._store = store
        self._publisher = publisher
        self._questions = questions
        self._num_generations = num_generations
        self._loop = asyncio.get_running_loop()
        self._num_groups = 0
        self._published: int | None = None
        self._ended = asyncio.Event()

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Sample a batch with the trainer's current weights."""
        if self._ended.is_set():
            raise TrainingError("the run ends")
        step = int(trainer.state.global_step)
        if step != self._published:
            self._write_weights(trainer, step)
        question_numbers = [int(number) for number in prompts[:: self._num_generations]]
        sampling = self._sample(question_numbers, step, is_new=step != self._published)
        rows = asyncio.run_coroutine_threadsafe(sampling, self._loop).result()
        self._published = step
        return {
            "prompt_ids": [row.prompt_ids.tolist() for row, _ in rows],
            "completion_ids": [row.completion_ids.tolist() for row, _ in rows],
            "logprobs": [row.logprobs.tolist() for row, _ in rows],
            "env_mask": [row.mask.astype(int).tolist() for row, _ in rows],
            "score": [score for _, score in rows],
        }

    def end(self) -> None:
        """Make calls fail from now on; called in the event loop."""
        self._ended.set()

    def _write_weights(self, trainer: Any, step: int) -> None:
        with atomic_directory(self._publisher.directory(step)) as staging:
            save_model(trainer, staging)

    async def _sample(
        self, question_numbers: Sequence[int], step: int, *, is_new: bool
    ) -> list[ScoredSequence]:
        store = self._store
        if is_new:
            await self._publisher.announce(step)
        tag = f"trl@{self._num_groups}"
        tasks = [
            task.model_copy(update={"id": id_of_task("train", task.order, task.dataset_id)})
            for position, number in enumerate(question_numbers)
            for task in tasks_from_questions(
                [self._questions[number]],
                "train",
                num_generations=self._num_generations,
                first_order=self._num_groups + position,
                tag=tag,
            )
        ]
        self._num_groups += len(tasks)
        await store.tasks.add(tasks)
        await store.runs.set_admission(self._num_groups)
        while await store.tasks.count(tag=tag, status="completed") < len(tasks):
            if await stopped_within(self._ended, _POLL_SECONDS):
                raise TrainingError("the run ends")
        groups = await store.ledger.ready_groups(limit=len(tasks))
        records = [record for group in groups for record in group]
        return await self._rows(records, step + 1)

    async def _rows(self, records: Sequence[DBRecordData], step: int) -> list[ScoredSequence]:
        """Return the rollouts in TRL's format, and record their use in the ledger."""
        found = {r.record_id: longest_sequence(r.turns) for r in records if r.score is not None}
        usable = {name: row for name, row in found.items() if row is not None and row.num_sampled}
        if not usable:
            raise TrainingError(
                f"step {step}: none of {len(records)} rollouts has both a score and tokens to "
                "learn from; see the samplers' logs"
            )
        await self._store.ledger.reserve(DEFAULT_CONSUMER, sorted(usable), step)
        unusable = [r.record_id for r in records if r.record_id not in usable]
        if unusable:
            await self._store.ledger.drop(DEFAULT_CONSUMER, unusable, step, "nothing to learn from")
        scores = [r.score.value for r in records if r.score is not None]
        self.reward_means.append(sum(scores) / len(scores))
        first = next(iter(usable.values()))
        no_loss = replace(
            first,
            completion_ids=first.completion_ids[:1],
            mask=first.mask[:1] & False,
            logprobs=first.logprobs[:1] * 0,
        )
        return [
            (found.get(r.record_id) or no_loss, None if r.score is None else r.score.value)
            for r in records
        ]


def longest_sequence(turns: Sequence[DispatchedSamplingTask]) -> RolloutSequence | None:
    """Return the conversation of a rollout with the most sampled tokens; None if none has any.

    Turns whose own advantage prevents learning (calls that cannot be parsed) are part of the
    sequence, but have no loss.
    """
    record_id = next((turn.record_id for turn in turns if turn.added_images), None)
    if record_id is not None:
        raise TrainingError(
            f"record {record_id} contains images, and this engine supports text only; train with "
            "agentrl run"
        )
    turns_without_loss = {turn.id for turn in turns if turn.advantage == 0.0}
    tokens = sorted(turn_tokens(turns), key=lambda turn: turn.chain)
    sequences = [
        _sequence(list(chain), turns_without_loss)
        for _, chain in groupby(tokens, lambda t: t.chain)
    ]
    return max(sequences, key=lambda sequence: sequence.num_sampled, default=None)


def _sequence(chain: Sequence[TurnTokens], turns_without_loss: set[str]) -> RolloutSequence:
    full_ids = max(chain, key=lambda turn: len(turn.full_ids)).full_ids
    start = min(turn.num_prompt_tokens for turn in chain)
    mask = np.zeros(len(full_ids), dtype=np.bool_)
    logprobs = np.zeros(len(full_ids), dtype=np.float32)
    for turn in chain:
        if turn.turn_id in turns_without_loss:
            continue
        output_slice = slice(turn.num_prompt_tokens, len(turn.full_ids))
        # A later prompt may have replaced the token that ended a reply.
        kept = full_ids[output_slice] == turn.output_ids
        mask[output_slice] = kept
        logprobs[output_slice] = np.where(kept, turn.behavior_logprobs, 0.0)
    return RolloutSequence(full_ids[:start], full_ids[start:], mask[start:], logprobs[start:])


def reward_of_rollout(score: list[float | None], **_: Any) -> list[float | None]:
    """Return the scores of the rollouts, as TRL's reward function."""
    return score


def save_model(trainer: Any, folder: Any) -> None:
    """Write the trainer's model and tokenizer as a Hugging Face directory."""
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
