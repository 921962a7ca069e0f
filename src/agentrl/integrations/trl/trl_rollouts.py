"""TRL's rollout function: new weights to the servers, questions to the samplers, tokens to TRL."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentrl.datasets.question import Question
from agentrl.datasets.task_stream import tasks_from_questions
from agentrl.errors import TrainingError
from agentrl.inference.weight_sync import PolicyPublisher
from agentrl.integrations.trl.sequences import RolloutSequence, longest_sequence
from agentrl.runtime.atomic_directory import atomic_directory
from agentrl.runtime.signals import stopped_within
from agentrl.schema import DBRecordData
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore

_POLL_SECONDS = 0.1

Row = tuple[RolloutSequence, float | None]
"""A rollout and its score; None where the infrastructure failed it."""


class Rollouts:
    """Called by TRL in its thread; the store is spoken to in the event loop that made this.

    TRL's batch has a place for every rollout. One that could not be played, although it was tried
    `max_attempts` times, fills its place with a token that carries no loss and has no reward; TRL
    leaves it out of the group's mean.

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
        """Play a batch with the weights that the trainer has now.

        Args:
            prompts: numbers of questions, each `num_generations` times in a row.
            trainer: TRL's `GRPOTrainer`.

        Returns:
            `prompt_ids`, `completion_ids`, `logprobs`, `env_mask` and `score`, each with an entry a
            prompt.

        Raises:
            TrainingError: no rollout of the batch has a token to learn from, or training ends.
        """
        if self._ended.is_set():
            raise TrainingError("the run ends")
        step = int(trainer.state.global_step)
        if step != self._published:
            self._write_weights(trainer, step)
        asked = [int(number) for number in prompts[:: self._num_generations]]
        playing = self._play(asked, step, is_new=step != self._published)
        rows = asyncio.run_coroutine_threadsafe(playing, self._loop).result()
        self._published = step
        return {
            "prompt_ids": [row.prompt_ids.tolist() for row, _ in rows],
            "completion_ids": [row.completion_ids.tolist() for row, _ in rows],
            "logprobs": [row.logprobs.tolist() for row, _ in rows],
            "env_mask": [row.mask.astype(int).tolist() for row, _ in rows],
            "score": [score for _, score in rows],
        }

    def end(self) -> None:
        """Let calls fail from now on; called in the event loop."""
        self._ended.set()

    def _write_weights(self, trainer: Any, step: int) -> None:
        with atomic_directory(self._publisher.directory(step)) as staging:
            save_model(trainer, staging)

    async def _play(self, asked: Sequence[int], step: int, *, is_new: bool) -> list[Row]:
        store = self._store
        if is_new:
            await self._publisher.announce(step)
        tag = f"trl@{self._num_groups}"
        tasks = [
            task.model_copy(update={"id": f"train/{task.order}/{task.dataset_id}"})
            for position, number in enumerate(asked)
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

    async def _rows(self, records: Sequence[DBRecordData], step: int) -> list[Row]:
        """Return the rollouts as TRL takes them, and note in the ledger what becomes of them."""
        found = {r.record_id: longest_sequence(r.turns) for r in records if r.score is not None}
        usable = {name: row for name, row in found.items() if row is not None and row.num_sampled}
        if not usable:
            raise TrainingError(
                f"step {step}: not one of {len(records)} rollouts has a score and a token to learn "
                "from; see the samplers' logs"
            )
        await self._store.ledger.reserve(DEFAULT_CONSUMER, sorted(usable), step)
        lost = [r.record_id for r in records if r.record_id not in usable]
        if lost:
            await self._store.ledger.drop(DEFAULT_CONSUMER, lost, step, "nothing to learn from")
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


def reward_of_rollout(score: list[float | None], **_: Any) -> list[float | None]:
    """TRL's reward function: the scores that came with the rollouts."""
    return score


def save_model(trainer: Any, folder: Any) -> None:
    """Write the trainer's model and tokenizer as a Hugging Face directory."""
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
