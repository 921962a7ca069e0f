"""`agentrl sft`: supervised fine-tuning with the machinery of reinforcement learning.

Cross-entropy is one more loss over the same target tokens, so ranks, token trees, checkpoints,
resuming, metrics and export are shared. Servers and samplers are not used.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import and_, eq
from pathlib import Path
from typing import Any, TypeVar

from transformers import PretrainedConfig

from agentrl.config.sections import ConfigSection, DataSection, RootConfig, RunSection
from agentrl.config.validation.checks import check_fine_tuning
from agentrl.data import StepBatch
from agentrl.distributed import Ranks
from agentrl.errors import ConfigError
from agentrl.models.checkpoints.architectures import num_positions
from agentrl.models.load import read_config
from agentrl.models.vision.image_reader import ImageReader
from agentrl.plugins.sft.curriculum import (
    Curriculum,
    Example,
    continued_example,
    file_examples,
    record_examples,
    sft_batch,
)
from agentrl.plugins.sft.learned import summed_up, suspicions
from agentrl.renderers.renderer import Renderer
from agentrl.runtime.telemetry.tracker_checks import check_trackers
from agentrl.store import TrajectoryStore
from agentrl.trainer.after_step import call_after_step
from agentrl.trainer.bootstrap import ending_ranks_on_error, run_on_ranks
from agentrl.trainer.checkpoint import Checkpoint, CheckpointSaver, checkpoint_to_resume
from agentrl.trainer.learner.settings import LearnerSettings
from agentrl.trainer.merging import built_step, with_exact_merge
from agentrl.trainer.metrics.history import StepMetrics
from agentrl.trainer.metrics.measures import check_finite, check_last_steps, learner_figures
from agentrl.trainer.metrics.metrics_file import append_eval_loss
from agentrl.trainer.metrics.reporting import write_summary
from agentrl.trainer.rl.run_start import (
    TrainingSession,
    start_weights,
    state_to_resume,
    training_session,
)
from agentrl.trainer.rl.step_groups import image_reader

logger = logging.getLogger(__name__)
_Section = TypeVar("_Section", bound=ConfigSection)
_BATCH_SIZE, _NUM_EPOCHS = 8, 3
"""As in Hugging Face's Trainer."""
_LEARNING_RATE, _ADAPTER_LEARNING_RATE = 2e-5, 2e-4
"""As in TRL; an adapter needs about ten times the rate of the full weights."""
_ANSWER_TOKENS, _ANSWER_PASSES = 48, 8
"""Maximum length of the answer that is shown, and of the forward passes for it. A pass gives the tokens in
which the model follows the conversation, and the next one.
"""


@dataclass(frozen=True)
class SftResult:
    """The result of a fine-tuning run."""

    status: str
    """`completed`, or `stopped` by a signal."""
    step: int
    model_path: Path
    """Hugging Face directory of the last weights."""
    summary_path: Path


def with_fine_tuning_defaults(config: RootConfig) -> RootConfig:
    """Return the configuration with the values of supervised fine-tuning for unset flags.

    Conversations are short and their loss has little noise, so steps are smaller and more than in
    reinforcement learning, and the learning rate is higher. Held-out conversations are evaluated
    before the first and after the last step, unless the user says otherwise.
    """
    rate = _ADAPTER_LEARNING_RATE if config.model.lora_rank else _LEARNING_RATE
    trainer: dict[str, Any] = {
        "per_device_train_batch_size": _BATCH_SIZE,
        "gradient_accumulation_steps": 1,
        "learning_rate": rate,
    }
    if config.data.eval_file is not None:
        trainer["eval_strategy"] = "ends"
    sections: dict[str, Any] = {
        "trainer": _with_unset(config.trainer, trainer),
        "data": _with_unset(config.data, {"num_train_epochs": _NUM_EPOCHS}),
    }
    return config.model_copy(update=sections)


def _with_unset(section: _Section, values: Mapping[str, Any]) -> _Section:
    unset = {name: value for name, value in values.items() if name not in section.model_fields_set}
    return section.model_copy(update=unset)


def fine_tune(config: RootConfig, records_uri: str | None = None) -> SftResult | None:
    """Fine-tune on conversations, or resume from the newest checkpoint.

    Returns:
        The result; None on ranks other than 0.
    """
    return run_on_ranks(
        "sft",
        config,
        lambda ranks, stop: lead_sft(config, ranks, stop=stop, records_uri=records_uri),
    )


async def lead_sft(
    config: RootConfig, ranks: Ranks, *, stop: asyncio.Event, records_uri: str | None = None
) -> SftResult:
    """Run rank 0's part of `fine_tune` in a running event loop."""
    config = with_fine_tuning_defaults(config)
    with ending_ranks_on_error(ranks):
        check_trackers(config.trainer.report_to)
        checkpoint = _own_checkpoint(config.run)
        weights = start_weights(config.model, checkpoint, ranks.shape)
        renderer = Renderer.of_policy(config.model, weights.model_path)
        reader = image_reader(weights.model_path, config.model)
        examples = await _examples(config.data, renderer, reader, records_uri)
        held_out: Sequence[Example] = ()
        if config.data.eval_file is not None:
            held_out = await asyncio.to_thread(
                file_examples, config.data.eval_file, renderer, reader
            )
        model_config = read_config(
            weights.model_path, trust_remote_code=config.model.trust_remote_code
        )
        decoder = model_config.get_text_config()
        _check_fit(examples, decoder, config.data.train_file or config.data.records_of)
        _check_fit(held_out, decoder, config.data.eval_file)
        curriculum = _curriculum(config, len(examples), ranks.shape.dp_size)
        if checkpoint is not None and checkpoint.step > curriculum.num_steps:
            raise ConfigError(
                f"run {config.run.run_name!r} is already at step {checkpoint.step}, and these data "
                f"and flags have {curriculum.num_steps}; raise --num_train_epochs or --max_steps to "
                "continue, or use another --run_name"
            )
        settings = LearnerSettings(
            weights=weights,
            model=config.model,
            # The learning-rate schedule ends with the data.
            trainer=config.trainer.model_copy(update={"max_steps": curriculum.num_steps}),
            algorithm=None,
            seed=config.run.seed,
            keeps_dtype=True,
        )
        settings = await asyncio.to_thread(with_exact_merge, settings, ranks.shape)
        state_path = state_to_resume(checkpoint, curriculum.num_steps)
        if config.run.delete_existing:
            shutil.rmtree(config.run.output_path, ignore_errors=True)
    async with training_session(
        config, ranks, settings, checkpoint, state_path=state_path, stop=stop, kind="sft"
    ) as session:
        by_token = config.algorithm.token_level_loss
        return await _SftLoop(
            session, curriculum, examples, held_out, by_token=by_token, renderer=renderer
        ).run()


class _SftLoop:
    """The training loop on rank 0."""

    def __init__(
        self,
        session: TrainingSession,
        curriculum: Curriculum,
        examples: Sequence[Example],
        held_out: Sequence[Example],
        *,
        by_token: bool,
        renderer: Renderer,
    ) -> None:
        self._session = session
        self._renderer = renderer
        self._group = session.group
        self._history = session.history
        self._trainer = session.trainer
        self._curriculum = curriculum
        self._examples = examples
        self._held_out = held_out
        self._by_token = by_token
        self._model_path = session.output_path / "model"
        self._saver = CheckpointSaver(
            session.output_path,
            group=session.group,
            trainer=session.trainer,
            saved_step=session.history.last_step,
        )
        self._started = time.monotonic()

    async def run(self) -> SftResult:
        """Run the remaining steps."""
        history, num_steps = self._history, self._curriculum.num_steps
        self._log_start()
        if self._is_eval_due(history.last_step):
            await self._evaluate()
        started, first = time.monotonic(), history.last_step
        while history.last_step < num_steps and not self._session.stop.is_set():
            await self._step(history.last_step + 1)
            if history.last_step % self._trainer.logging_steps == 0:
                spent = time.monotonic() - started
                seconds_left = spent / (history.last_step - first) * (num_steps - history.last_step)
                self._log_step(history.steps[-1], seconds_left)
        await self._saver.settle()
        if self._saver.saved_step < history.last_step or not self._model_path.is_dir():
            await self._save()
            await self._saver.settle()
        is_done = history.last_step >= num_steps
        if is_done and self._trainer.eval_strategy != "no" and num_steps not in history.eval_losses:
            await self._evaluate()
        elif is_done:
            await self._log_answer()
        if is_done:
            check_last_steps(history)
        history.add_seconds("total", time.monotonic() - self._started)
        status = "completed" if is_done else "stopped"
        summary_path = write_summary(self._session.output_path, self._summary(status))
        return SftResult(status, history.last_step, self._model_path, summary_path)

    async def _step(self, step: int) -> None:
        members = self._curriculum.members(step)
        examples = [self._examples[index] for index in members]
        seconds: dict[str, float] = {}
        batch = await self._batch(examples, by_token=self._by_token)
        await self._group.forward_backward(batch.micro_batches)
        outcome = await self._group.optim_step(step - 1)
        check_finite(self._history, step, outcome, self._session.output_path)
        for phase, spent in outcome.seconds.items():
            self._history.add_seconds(phase, spent, seconds)
        stats = batch.stats
        is_applied = outcome.skipped is None
        metrics = StepMetrics(
            step=step,
            reward_mean=None,
            num_groups=len(examples),
            num_records=len(examples),
            num_trained_records=len(examples) if is_applied else 0,
            num_output_tokens=stats.num_targets,
            num_trained_tokens=stats.num_targets if is_applied else 0,
            seconds=seconds,
            **learner_figures(outcome, stats, num_ranks=self._group.num_ranks),
        )
        self._history.steps.append(metrics)
        if step % self._trainer.save_steps == 0 or step == self._curriculum.num_steps:
            await self._save()
        if step < self._curriculum.num_steps and self._is_eval_due(step):
            await self._evaluate()
        self._session.report(metrics)
        await call_after_step(self._trainer.on_step, metrics, metrics.step)

    async def _batch(self, examples: Sequence[Example], *, by_token: bool = True) -> StepBatch:
        build = partial(
            sft_batch,
            examples,
            token_budget=self._trainer.max_tokens,
            num_ranks=self._group.dp_size,
            by_token=by_token,
        )
        return await asyncio.to_thread(built_step, build, self._trainer.merge)

    async def _evaluate(self) -> None:
        """Record the loss on the held-out conversations."""
        batch = await self._batch(self._held_out)
        loss = await self._group.evaluate(batch.micro_batches)
        step = self._history.last_step
        self._history.eval_losses[step] = loss
        append_eval_loss(self._session.output_path, step, loss)
        self._session.trackers.log({"eval_loss": loss}, step)
        logger.info("loss on held-out conversations after step %d: %.4f", step, loss)
        await self._log_answer()

    async def _log_answer(self) -> None:
        """Log what the model now answers to a conversation, greedily; only with a single rank."""
        if self._group.num_ranks > 1:
            return
        example = (self._held_out or self._examples)[0]
        turn = example.turns[0]
        given = turn.full_ids[turn.num_prompt_tokens :][:_ANSWER_TOKENS].tolist()
        logger.info("asking the model for its answer to %s", example.id)
        reply: list[int] = []
        stops = frozenset(self._renderer.stop_token_ids)
        for _ in range(_ANSWER_PASSES):
            guess = given[len(reply) : -1]
            asked = continued_example(example, reply, guess)
            batch = sft_batch([asked], token_budget=self._trainer.max_tokens, num_ranks=1)
            (scores,) = await self._group.scores(batch.micro_batches)
            likeliest = scores.likeliest.tolist()
            num_right = sum(accumulate(map(eq, likeliest, guess), and_))
            reply += likeliest[: num_right + 1]
            if len(reply) >= _ANSWER_TOKENS or not stops.isdisjoint(reply):
                break
        logger.info(
            "after step %d, %s: the model answers %r, the conversation has %r",
            self._history.last_step,
            example.id,
            self._renderer.decode(reply),
            self._renderer.decode(given),
        )

    async def _save(self) -> None:
        """Export the weights and write a checkpoint of them."""
        await self._group.export(self._model_path)
        await self._saver.save(self._model_path, self._history)

    def _is_eval_due(self, step: int) -> bool:
        strategy = self._trainer.eval_strategy
        if strategy == "no" or step in self._history.eval_losses:
            return False
        return step == 0 or (strategy == "steps" and step % self._trainer.eval_steps == 0)

    def _log_start(self) -> None:
        """Say what is learned, in how many steps, and what is suspicious about it."""
        lessons = [example.lesson for example in self._examples]
        num_tokens = sum(example.num_targets for example in self._examples)
        logger.info("%s", summed_up(lessons, num_tokens))
        for suspicion in suspicions(lessons):
            logger.warning("%s", suspicion)
        plan, done = self._curriculum, self._history.last_step
        logger.info(
            "%d steps of %d conversations (%.3g epochs), learning rate %g; %d done so far",
            plan.num_steps,
            plan.examples_per_step,
            plan.num_epochs_after(plan.num_steps),
            self._trainer.learning_rate,
            done,
        )
        if self._held_out and self._trainer.eval_strategy == "no":
            logger.warning("--eval_strategy no: the conversations of --eval_file are not used")

    def _log_step(self, metrics: StepMetrics, seconds_left: float) -> None:
        logger.info(
            "step %d/%d (%.0f %%) loss %s grad %s lr %.2e, %.0f tokens/s, %.0f s left",
            metrics.step,
            self._curriculum.num_steps,
            100.0 * metrics.step / self._curriculum.num_steps,
            "-" if metrics.loss is None else f"{metrics.loss:.4f}",
            "-" if metrics.grad_norm is None else f"{metrics.grad_norm:.3g}",
            metrics.learning_rate,
            metrics.tokens_per_second or 0.0,
            seconds_left,
        )

    def _summary(self, status: str) -> dict[str, object]:
        history = self._history
        return {
            "run": self._session.run.run_name,
            "status": status,
            "steps": history.last_step,
            "loss": [step.loss for step in history.steps],
            "eval_loss": {str(step): loss for step, loss in sorted(history.eval_losses.items())},
            "conversations": len(self._examples),
            "epochs": self._curriculum.num_epochs_after(history.last_step),
            "tokens": {
                "trained": sum(step.num_trained_tokens for step in history.steps),
                "forward": sum(step.num_forward_tokens for step in history.steps),
                "forward_without_merging": sum(step.num_flat_tokens for step in history.steps),
            },
            "seconds": {name: round(spent, 3) for name, spent in sorted(history.seconds.items())},
            "model": str(self._model_path),
        }


async def _examples(
    data: DataSection, renderer: Renderer, reader: ImageReader | None, records_uri: str | None
) -> list[Example]:
    check_fine_tuning(data)
    if data.train_file is not None:
        return await asyncio.to_thread(file_examples, data.train_file, renderer, reader)
    assert records_uri is not None, "the command finds the database of --records_of"
    async with TrajectoryStore.connect(records_uri, data.records_of) as store:
        return await record_examples(store, data.min_score, reader)


def _check_fit(
    examples: Sequence[Example], decoder: PretrainedConfig, source: Path | str | None
) -> None:
    """Refuse conversations with positions or tokens that the model has no embeddings for."""
    longest = num_positions(decoder)
    for example in examples:
        for turn in example.turns:
            if longest and len(turn.full_ids) > longest:
                raise ConfigError(
                    f"{source}: {example.id}: {len(turn.full_ids)} tokens, and the model has "
                    f"{longest} positions (max_position_embeddings in its config.json); "
                    "shorten or remove it"
                )
            if turn.full_ids.max() >= decoder.vocab_size:
                raise ConfigError(
                    f"{source}: {example.id}: a token has id {turn.full_ids.max()}, and the model's "
                    f"vocab_size is {decoder.vocab_size}; use the tokenizer of the model"
                )


def _own_checkpoint(run: RunSection) -> Checkpoint | None:
    """Return the checkpoint to resume; none with `--fresh`, which needs an empty directory."""
    checkpoint = checkpoint_to_resume(run.output_path)
    if checkpoint is not None and checkpoint.history.kind != "sft":
        raise ConfigError(
            f"{checkpoint.path} belongs to a reinforcement-learning run; use another --run_name, and "
            f"--model_name_or_path {checkpoint.model_path} to start from its weights"
        )
    if not run.fresh:
        return checkpoint
    if run.output_path.exists() and any(run.output_path.iterdir()) and not run.delete_existing:
        raise ConfigError(
            f"--fresh: there are files in {run.output_path}; choose another --run_name, or add "
            "--delete_existing to delete them"
        )
    return None


def _curriculum(config: RootConfig, num_examples: int, dp_size: int) -> Curriculum:
    trainer = config.trainer
    return Curriculum(
        num_examples=num_examples,
        examples_per_step=trainer.per_device_train_batch_size
        * trainer.gradient_accumulation_steps
        * dp_size,
        num_epochs=config.data.num_train_epochs,
        # As for Hugging Face's Trainer: a given number of steps wins over epochs.
        max_steps=trainer.max_steps if "max_steps" in trainer.model_fields_set else None,
        seed=config.run.seed if config.data.shuffle else None,
    )
