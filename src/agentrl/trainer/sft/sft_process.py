"""`agentrl sft`: supervised fine-tuning with the ranks, the token trees and the files of training.

Cross-entropy is one more loss over the same terms; checkpoints, resume, metrics and the export are
those of reinforcement learning. Neither servers nor samplers take part.
"""

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from agentrl.config.checks import check_trackers
from agentrl.config.sections import RootConfig
from agentrl.distributed import Ranks, joined_ranks
from agentrl.errors import ConfigError
from agentrl.renderers.renderer import Renderer
from agentrl.runtime.logs import setup_logging
from agentrl.runtime.prometheus import metrics_endpoint
from agentrl.runtime.signals import stop_on_signals
from agentrl.store import TrajectoryStore
from agentrl.trainer.checkpoint.checkpoint import Checkpoint, latest_checkpoint
from agentrl.trainer.checkpoint.saver import Saver
from agentrl.trainer.learner.learner import StepOutcome
from agentrl.trainer.learner.optimizer import parse_optim_args
from agentrl.trainer.metrics.history import History, StepMetrics
from agentrl.trainer.metrics.measures import check_finite, finite, merge_ratios, speeds
from agentrl.trainer.metrics.reporting import append_metrics, rewind_metrics, write_summary
from agentrl.trainer.metrics.trackers import Trackers, open_trackers
from agentrl.trainer.metrics.trainer_metrics import trainer_metrics
from agentrl.trainer.sft.curriculum import (
    Curriculum,
    Example,
    file_examples,
    record_examples,
    sft_batch,
)
from agentrl.trainer.start_weights import StartWeights, start_weights
from agentrl.trainer.train_process import STOPS_WITH, check_mesh, make_learner, mesh_shape
from agentrl.trainer.worker_group import Team, follow

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftResult:
    """How a fine-tuning ended."""

    status: str
    """`completed`, or `stopped` by a signal."""
    step: int
    model_path: Path
    """Hugging Face directory of the last weights."""
    summary_path: Path


@dataclass(frozen=True)
class _Start:
    """What rank 0 decided; None: it gave up."""

    config: RootConfig | None
    weights: StartWeights | None


def fine_tune(config: RootConfig, records_uri: str | None = None) -> SftResult | None:
    """Fine-tune on conversations, resuming where the run was left.

    Args:
        config: the resolved configuration.
        records_uri: database of the run whose records are learnt from (`--records_of`).

    Returns:
        How it ended; None on ranks other than 0.

    Raises:
        ConfigError: something that the user gave cannot be used; nothing was changed then.
        TrainingError: losses or gradients stay non-finite.
    """
    setup_logging(f"sft-{os.environ.get('RANK', '0')}")
    if config.trainer.trainer_threads is not None:
        torch.set_num_threads(config.trainer.trainer_threads)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with joined_ranks(lambda world_size: mesh_shape(config, world_size)) as ranks:
        if ranks.is_main:
            return asyncio.run(_lead_until_signalled(config, ranks, records_uri))
        start: _Start = ranks.broadcast(None)
        if start.config is not None and start.weights is not None:
            follow(make_learner(start.config, ranks, start.weights, fine_tunes=True), ranks)
        return None


async def _lead_until_signalled(
    config: RootConfig, ranks: Ranks, records_uri: str | None
) -> SftResult:
    return await lead_sft(config, ranks, records_uri=records_uri, stop=stop_on_signals(STOPS_WITH))


async def lead_sft(
    config: RootConfig, ranks: Ranks, *, stop: asyncio.Event, records_uri: str | None = None
) -> SftResult:
    """Do what `fine_tune` does on rank 0, inside a running event loop.

    Args:
        config: the resolved configuration.
        ranks: this process, rank 0.
        stop: setting it ends the run after the current step, with a checkpoint.
        records_uri: as in `fine_tune`.
    """
    async with AsyncExitStack() as stack:
        try:
            parse_optim_args(config.trainer.optim_args)
            check_trackers(config.trainer.report_to)
            checkpoint = _own_checkpoint(config)
            weights = start_weights(config.model, checkpoint)
            check_mesh(config, ranks, weights.model_path)
            renderer = Renderer.load(weights.model_path)
            examples = await _examples(config, renderer, records_uri)
            held_out = (
                []
                if config.data.eval_file is None
                else await asyncio.to_thread(file_examples, config.data.eval_file, renderer)
            )
            plan = _plan(config, len(examples), ranks.shape.dp_size)
            config = _for_sft(config, plan)
            state = (
                checkpoint.state_path if checkpoint and checkpoint.step < plan.num_steps else None
            )
        except BaseException:
            ranks.broadcast(_Start(None, None))
            raise
        ranks.broadcast(_Start(config, weights))
        team = await stack.enter_async_context(
            Team(ranks, lambda: make_learner(config, ranks, weights, fine_tunes=True))
        )
        if state is not None:
            await team.load_state(state)
        history = checkpoint.history if checkpoint else History(kind="sft")
        rewind_metrics(config.run.output_path, history)
        trackers = open_trackers(config)
        stack.callback(trackers.finish)
        stack.enter_context(
            metrics_endpoint(
                config.run.metrics_host, config.run.metrics_port, lambda: trainer_metrics(history)
            )
        )
        loop = _SftLoop(config, team, history, trackers, plan, examples, held_out)
        return await loop.run(stop)


class _SftLoop:
    """The steps on rank 0."""

    def __init__(
        self,
        config: RootConfig,
        team: Team,
        history: History,
        trackers: Trackers,
        plan: Curriculum,
        examples: Sequence[Example],
        held_out: Sequence[Example],
    ) -> None:
        self._output_path = config.run.output_path
        self._run_name = config.run.run_name
        self._trainer = config.trainer
        self._by_token = config.algorithm.token_level_loss
        self._team = team
        self._history = history
        self._trackers = trackers
        self._plan = plan
        self._examples = examples
        self._held_out = held_out
        self._model_path = self._output_path / "model"
        self._saver = Saver(
            config.run.output_path,
            team=team,
            trainer=config.trainer,
            saved_step=history.last_step,
            on_saved=_nothing_more,
        )
        self._entered = time.monotonic()

    async def run(self, stop: asyncio.Event) -> SftResult:
        """Make the steps that are left."""
        history, num_steps = self._history, self._plan.num_steps
        logger.info(
            "%d conversations with %d tokens to learn, %d steps of %d; %d done so far",
            len(self._examples),
            sum(example.num_terms for example in self._examples),
            num_steps,
            self._plan.examples_per_step,
            history.last_step,
        )
        if self._is_eval_due(history.last_step):
            await self._evaluate()
        begun = time.monotonic()
        first = history.last_step
        while history.last_step < num_steps and not stop.is_set():
            await self._step(history.last_step + 1)
            if history.last_step % self._trainer.logging_steps == 0:
                spent = time.monotonic() - begun
                left = spent / (history.last_step - first) * (num_steps - history.last_step)
                self._log_step(history.steps[-1], left)
        await self._saver.settle()
        if self._saver.saved_step < history.last_step or not self._model_path.is_dir():
            await self._save()
            await self._saver.settle()
        is_over = history.last_step >= num_steps
        if is_over and self._trainer.eval_strategy != "no" and num_steps not in history.eval_losses:
            await self._evaluate()
        history.add_seconds("total", time.monotonic() - self._entered)
        status = "completed" if is_over else "stopped"
        summary_path = write_summary(self._output_path, self._summary(status))
        return SftResult(status, history.last_step, self._model_path, summary_path)

    async def _step(self, step: int) -> None:
        members = self._plan.members(step)
        chosen = [self._examples[index] for index in members]
        batch = await asyncio.to_thread(
            sft_batch,
            chosen,
            token_budget=self._trainer.max_tokens,
            num_ranks=self._team.num_shares,
            by_token=self._by_token,
        )
        outcome = await self._team.train(batch.micro_batches)
        check_finite(self._history, step, outcome, self._output_path)
        stats = batch.stats
        made = outcome.skipped is None
        self._history.steps.append(
            StepMetrics(
                step=step,
                reward_mean=None,
                num_groups=len(chosen),
                num_records=len(chosen),
                num_trained_records=len(chosen) if made else 0,
                loss=finite(outcome.loss),
                grad_norm=finite(outcome.grad_norm),
                learning_rate=outcome.learning_rate,
                entropy=finite(outcome.entropy),
                skipped=outcome.skipped,
                num_output_tokens=stats.num_terms,
                num_trained_tokens=stats.num_terms if made else 0,
                num_forward_tokens=stats.tokens_packed,
                num_flat_tokens=stats.tokens_flat,
                seconds={name: round(spent, 4) for name, spent in outcome.seconds.items()},
                time=time.time(),
                **merge_ratios(stats),
                **speeds(stats, outcome, num_ranks=self._team.num_ranks),
            )
        )
        self._account(outcome)
        if step % self._trainer.save_steps == 0 or step == self._plan.num_steps:
            await self._save()
        if step < self._plan.num_steps and self._is_eval_due(step):
            await self._evaluate()
        append_metrics(self._output_path, self._history.steps[-1])
        self._trackers.log(self._history.steps[-1].model_dump(exclude_none=True), step)

    async def _evaluate(self) -> None:
        """Note the loss on the held-out conversations."""
        batch = await asyncio.to_thread(
            sft_batch,
            self._held_out,
            token_budget=self._trainer.max_tokens,
            num_ranks=self._team.num_shares,
        )
        loss = await self._team.evaluate(batch.micro_batches)
        step = self._history.last_step
        self._history.eval_losses[step] = loss
        self._trackers.log({"eval_loss": loss}, step)
        logger.info("loss on held-out conversations after step %d: %.4f", step, loss)

    async def _save(self) -> None:
        """Export the weights and write a checkpoint of them."""
        await self._team.export(self._model_path)
        await self._saver.save(self._model_path, self._history)

    def _is_eval_due(self, step: int) -> bool:
        strategy = self._trainer.eval_strategy
        if strategy == "no" or step in self._history.eval_losses:
            return False
        return step == 0 or (strategy == "steps" and step % self._trainer.eval_steps == 0)

    def _account(self, outcome: StepOutcome) -> None:
        for phase, spent in outcome.seconds.items():
            self._history.add_seconds(phase, spent)

    def _log_step(self, metrics: StepMetrics, seconds_left: float) -> None:
        logger.info(
            "step %d/%d (%.0f %%) loss %s grad %s lr %.2e, %.0f tokens/s, %.0f s left",
            metrics.step,
            self._plan.num_steps,
            100.0 * metrics.step / self._plan.num_steps,
            "-" if metrics.loss is None else f"{metrics.loss:.4f}",
            "-" if metrics.grad_norm is None else f"{metrics.grad_norm:.3g}",
            metrics.learning_rate,
            metrics.tokens_per_second or 0.0,
            seconds_left,
        )

    def _summary(self, status: str) -> dict[str, object]:
        history = self._history
        return {
            "run": self._run_name,
            "status": status,
            "steps": history.last_step,
            "loss": [step.loss for step in history.steps],
            "eval_loss": {str(step): loss for step, loss in sorted(history.eval_losses.items())},
            "conversations": len(self._examples),
            "epochs": history.last_step * self._plan.examples_per_step / len(self._examples),
            "tokens": {
                "trained": sum(step.num_trained_tokens for step in history.steps),
                "forward": sum(step.num_forward_tokens for step in history.steps),
                "forward_without_merging": sum(step.num_flat_tokens for step in history.steps),
            },
            "seconds": {name: round(spent, 3) for name, spent in sorted(history.seconds.items())},
            "model": str(self._model_path),
        }


async def _examples(
    config: RootConfig, renderer: Renderer, records_uri: str | None
) -> list[Example]:
    data = config.data
    if (data.train_file is None) == (data.records_of is None):
        raise ConfigError("`agentrl sft` wants either --train_file FILE or --records_of RUN_NAME")
    if data.train_file is not None:
        return await asyncio.to_thread(file_examples, data.train_file, renderer)
    assert records_uri is not None, "the command finds the database of --records_of"
    async with TrajectoryStore.connect(records_uri, data.records_of) as store:
        return await record_examples(store, data.min_score)


def _own_checkpoint(config: RootConfig) -> Checkpoint | None:
    checkpoint = latest_checkpoint(config.run.output_path)
    if checkpoint is not None and checkpoint.history.kind != "sft":
        raise ConfigError(
            f"{checkpoint.path} is of a reinforcement-learning run; use another --run_name, and "
            f"--model_name_or_path {checkpoint.model_path} to start from its weights"
        )
    return checkpoint


async def _nothing_more(_: int) -> None:
    """No ledger follows the checkpoints of a fine-tuning."""


def _plan(config: RootConfig, num_examples: int, num_shares: int) -> Curriculum:
    trainer = config.trainer
    return Curriculum(
        num_examples=num_examples,
        examples_per_step=trainer.per_device_train_batch_size
        * trainer.gradient_accumulation_steps
        * num_shares,
        num_epochs=config.data.num_train_epochs,
        max_steps=trainer.max_steps,
        seed=config.run.seed if config.data.shuffle else None,
    )


def _for_sft(config: RootConfig, plan: Curriculum) -> RootConfig:
    """Return the configuration with a schedule that ends with the data."""
    trainer = config.trainer.model_copy(update={"max_steps": plan.num_steps})
    return config.model_copy(update={"trainer": trainer})
