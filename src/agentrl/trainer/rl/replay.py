"""`replay`: checks that a step's recorded data still produce the recorded step.

The weights of the last checkpoint before the step, and the groups that it trained on according to
the ledger, go through the same code as in training. Every difference from the run's records is
reported: turns by their advantages and importance ratios, the step by its loss, gradient norm and
learning rate, and the weights after it if a checkpoint kept them. Reads the store and the run's
files, writes neither.
"""

import asyncio
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from agentrl.config.loading import build_config, check_foreign, flat_values
from agentrl.config.own_function import SOURCES, is_reference, with_sources
from agentrl.config.sections import AlgorithmSection, RootConfig
from agentrl.data import SelectedGroup, StepBatch, build_training_step, select_group
from agentrl.data.shown_images import ImageBook
from agentrl.distributed import Ranks
from agentrl.errors import ConfigError
from agentrl.schema import Control, DBRecordData, Run, TurnTraining
from agentrl.schema.lost_versions import LostVersions, counted_in_steps
from agentrl.schema.run import ANY_AGE
from agentrl.store import TrajectoryStore
from agentrl.trainer.bootstrap import WorkerGroup, ending_ranks_on_error, learners, run_on_ranks
from agentrl.trainer.checkpoint import latest_checkpoint
from agentrl.trainer.learner.learner import StepOutcome
from agentrl.trainer.learner.settings import LearnerSettings
from agentrl.trainer.merging import built_step, with_exact_merge
from agentrl.trainer.metrics.history import StepMetrics
from agentrl.trainer.metrics.measures import finite
from agentrl.trainer.metrics.metrics_file import recorded_steps
from agentrl.trainer.rl.past_groups import without_left_out
from agentrl.trainer.rl.run_start import reference_path, start_weights
from agentrl.trainer.rl.step_groups import RecordImages, image_reader, scored_by

logger = logging.getLogger(__name__)

STEP_FLAGS = {
    *AlgorithmSection.model_fields,
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps"),
    *("optim_args", "weight_decay", "max_grad_norm", "max_tokens", "merge", "loss_seq_chunk_size"),
    *("trained_scorer", "torch_dtype", "torch_compile", "lora_alpha", "seed"),
} - {
    *Control.model_fields,
    *("reference_model", "staleness_policy"),
}
"""Flags that determine a step, given its records, none of them editable while a run continues. The
mesh and paths are those of this start."""
_MAX_REPORTED = 5
_FIGURES = ("loss", "grad_norm", "learning_rate")


@dataclass(frozen=True)
class Difference:
    """A difference from the recorded values of the run."""

    what: str
    """`loss`, `weights model.norm.weight`, `turn r/3 advantage`, ..."""
    recorded: float | str | None
    replayed: float | str | None

    @property
    def size(self) -> float:
        """The absolute difference; infinite if either is not a number."""
        if isinstance(self.recorded, float) and isinstance(self.replayed, float):
            return abs(self.recorded - self.replayed)
        return float("inf")


@dataclass(frozen=True)
class ReplayedStep:
    """One replayed optimizer step."""

    step: int
    differences: tuple[Difference, ...]
    """The first few of each kind; empty if the step equals the recorded one bit for bit."""
    weights: str
    """`equal`, `different`, or `not kept` if no checkpoint holds the weights after the step."""

    @property
    def equal(self) -> bool:
        """Whether everything recorded was reproduced bit for bit."""
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        """Return the step for `--json`."""
        return {
            "step": self.step,
            "equal": self.equal,
            "largest_difference": max((one.size for one in self.differences), default=0.0),
            "weights": self.weights,
            "differences": [asdict(one) for one in self.differences],
        }


def replay(config: RootConfig, uri: str, first: int, last: int) -> list[ReplayedStep] | None:
    """Replay the steps `first` to `last` of a run.

    Args:
        config: of the run, as it was trained.
        uri: of the run's database.
        first: first step to compare; those since the last checkpoint before it are replayed
            silently.
        last: last step.

    Returns:
        The steps; None on ranks other than 0.

    Raises:
        ConfigError: a step was not trained, or its files are gone.
        StoreError: the database does not respond.
    """

    async def lead(ranks: Ranks, stop: asyncio.Event) -> list[ReplayedStep]:
        async with AsyncExitStack() as stack:
            with ending_ranks_on_error(ranks):
                recorded = recorded_steps(config, first, last)
                checkpoint = latest_checkpoint(config.run.output_path, at_most=first - 1)
                steps = range(1 if checkpoint is None else checkpoint.step + 1, last + 1)
                store = await stack.enter_async_context(
                    TrajectoryStore.connect(uri, config.run.run_name)
                )
                run = await store.runs.get()
                trained = config_of_steps(steps, config, run)
                lost = () if run is None else run.lost_versions
                settings = LearnerSettings(
                    weights=start_weights(trained.model, checkpoint, ranks.shape),
                    model=trained.model,
                    trainer=trained.trainer,
                    algorithm=trained.algorithm,
                    seed=trained.run.seed,
                    reference_path=reference_path(trained.model, trained.algorithm),
                )
                settings = await asyncio.to_thread(with_exact_merge, settings, ranks.shape)
                state_path = None if checkpoint is None else checkpoint.state_path
            group = await stack.enter_async_context(learners(ranks, settings, state_path))
            replayed: list[ReplayedStep] = []
            images = RecordImages(store, image_reader(settings.weights.model_path, trained.model))
            for step in (one for one in steps if one in recorded):  # a retrain leaves some out
                if stop.is_set():
                    break
                result = await _replay_step(trained, store, group, recorded[step], images, lost)
                logger.info("step %d: %s", step, "equal" if result.equal else "different")
                if step >= first:
                    replayed.append(result)
            return replayed

    return run_on_ranks("replay", config, lead)


def config_of_steps(
    steps: range, config: RootConfig, run: Run | None, *, verb: str = "replay"
) -> RootConfig:
    """Return the configuration with which steps were computed.

    Raises:
        ConfigError: they were not all computed with the same one, or the database names what only the
            user can name.
    """
    if run is None:
        return config
    _note_changed_sources(config, run.config_at(steps[-1]))
    used = [_step_flags(run.config_at(step)) for step in steps]
    for step, values in zip(steps, used, strict=True):
        if values != used[0]:
            raise ConfigError(
                f"the run was resumed with other flags before step {step}; {verb} the steps up to "
                f"{step - 1}, or those from {step} on, which needs the checkpoint of step {step - 1}"
            )
    changed = {name: value for name, value in used[0].items() if value != run.config.get(name)}
    own = flat_values(config)
    check_foreign(changed, own, f"the database of run {run.name!r}")
    return build_config({**own, **changed}) if changed else config


def _note_changed_sources(config: RootConfig, recorded: Mapping[str, Any]) -> None:
    """Warn about functions of the user whose files are not those that computed the steps."""
    values = with_sources(flat_values(config))
    before = recorded.get(SOURCES)
    for flag, digest in values.get(SOURCES, {}).items():
        digest_before = before.get(flag) if isinstance(before, dict) else None
        if digest_before != digest:
            logger.warning(
                "the source of --%s %s has changed since the step (SHA-256 %.12s, now %.12s); "
                "differences may come from it",
                *(flag, values[flag], digest_before, digest),
            )


def _step_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    flags = {name: values[name] for name in STEP_FLAGS & values.keys()}
    schedule = flags.get("lr_scheduler_type")
    if schedule == "constant" or is_reference(str(schedule)):
        flags.pop("max_steps", None)
    return flags


async def _replay_step(
    config: RootConfig,
    store: TrajectoryStore,
    group: WorkerGroup,
    recorded: StepMetrics,
    images: RecordImages,
    lost: Sequence[LostVersions],
) -> ReplayedStep:
    step = recorded.step
    consumer = config.trainer.consumer
    trainings, whole = await store.ledger.trained_groups(consumer, step)
    records = [without_left_out(of_task, consumer) for of_task in whole]
    turns = (turn for of_task in records for record in of_task for turn in record.turns)
    records = [[counted_in_steps(one, lost) for one in of_task] for of_task in records]
    groups, differences = _select(config, step, trainings, records, await images.book(turns))
    build = partial(
        build_training_step,
        groups,
        config.algorithm,
        policy_version=step - 1,
        token_budget=config.trainer.max_tokens,
        num_ranks=group.dp_size,
        attention_cost=group.attention_cost,
    )
    # Another release may have chosen another way.
    batch = built_step(build, recorded.merge or config.trainer.merge)
    outcome: StepOutcome | None = None
    for _ in range(config.algorithm.max_trained_count):
        await group.forward_backward(batch.micro_batches)
        outcome = await group.optim_step(step - 1)
    assert outcome is not None
    differences += _figure_differences(recorded, outcome)
    differences += _turn_differences(trainings, batch, outcome)
    checkpoint = latest_checkpoint(config.run.output_path, at_most=step)
    weights = "not kept"
    if checkpoint is not None and checkpoint.step == step:
        with tempfile.TemporaryDirectory(prefix="agentrl-replay-") as folder:
            await group.export(Path(folder, "model"))
            changed = list(_weight_differences(checkpoint.model_path, Path(folder, "model")))
        weights = "different" if changed else "equal"
        differences += changed[:_MAX_REPORTED]
    return ReplayedStep(step, tuple(differences), weights)


def _select(
    config: RootConfig,
    step: int,
    trainings: Sequence[TurnTraining],
    records: Sequence[Sequence[DBRecordData]],
    images: ImageBook,
) -> tuple[list[SelectedGroup], list[Difference]]:
    """Repeat the selection from the store's data; report differences from the recorded step."""
    # The limit may have been edited during the run; the records state which turns the step used.
    algorithm = config.algorithm.under(ANY_AGE)
    used = {training.turn_id: training for training in trainings}
    groups: list[SelectedGroup] = []
    differences: list[Difference] = []
    for group_records in records:
        scored = scored_by(config.trainer.trained_scorer, group_records) or list(group_records)
        group = select_group(
            scored, algorithm, policy_version=step - 1, seed=config.run.seed, images=images
        )
        turns = tuple(turn for turn in group.turns if turn.turn_id in used)
        groups.append(replace(group, turns=turns, left_out=()))
        for turn in turns:
            before = used.pop(turn.turn_id)
            if before.advantage != turn.advantage:
                what = f"turn {turn.turn_id} advantage"
                differences.append(Difference(what, before.advantage, turn.advantage))
            if before.num_tokens != turn.num_targets:
                what = f"turn {turn.turn_id} tokens"
                both = (float(before.num_tokens), float(turn.num_targets))
                differences.append(Difference(what, *both))
    differences = differences[:_MAX_REPORTED]
    for turn_id in list(used)[:_MAX_REPORTED]:
        differences.append(Difference(f"turn {turn_id}", "trained", "not selected"))
    return groups, differences


def _figure_differences(recorded: StepMetrics, outcome: StepOutcome) -> Iterator[Difference]:
    for name in _FIGURES:
        before, now = getattr(recorded, name), finite(getattr(outcome, name))
        if before != now:
            yield Difference(name, before, now)


def _turn_differences(
    trainings: Sequence[TurnTraining], batch: StepBatch, outcome: StepOutcome
) -> list[Difference]:
    """Compare the importance ratios, which show every changed token and logprob of a turn."""
    differences: list[Difference] = []
    recorded = {training.turn_id: training.ratio for training in trainings}
    ratios = outcome.ratios
    for row, number in enumerate(ratios.turns.tolist()):
        turn_id = batch.turn_ids[number]
        before = recorded[turn_id]
        now = float(ratios.mean[row])
        if before is not None and before.mean != now:
            differences.append(Difference(f"turn {turn_id} ratio", before.mean, now))
    # A changed turn changes the packing of others, whose ratios then differ only by rounding.
    return sorted(differences, key=lambda one: one.size, reverse=True)[:_MAX_REPORTED]


def _weight_differences(kept: Path, replayed: Path) -> Iterator[Difference]:
    """Compare the tensors of two model directories bit for bit."""
    before, now = _tensors(kept), _tensors(replayed)
    for name in sorted(before.keys() | now.keys()):
        if name not in before or name not in now:
            yield Difference(
                f"weights {name}", *("present" if name in d else None for d in (before, now))
            )
            continue
        with (
            safe_open(before[name], "pt") as old_file,
            safe_open(now[name], "pt") as new_file,
        ):
            old, new = old_file.get_tensor(name), new_file.get_tensor(name)
        if not torch.equal(old, new):
            distances = (old.double() - new.double()).abs()
            index = int(distances.argmax())
            values = (float(old.flatten()[index]), float(new.flatten()[index]))
            yield Difference(f"weights {name}", *values)


def _tensors(folder: Path) -> Mapping[str, Path]:
    """Return tensor name -> file."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found
