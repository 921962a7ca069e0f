"""`retrain`: a run's steps made again from a checkpoint, without the records of a condition.

    ledger of the run ──records, steps──> origin ──> ledger and output directory of its own ──> trainer

The trainer is a further consumer of the run's database. What it repeats is in the run's document, which
records it leaves out is in its own ledger, and both are written before its first step: the same call
goes on after a kill. Each step trains on the turns that the run's step used; nothing is sampled.
"""

import asyncio
import shutil
from pathlib import Path

from pydantic import Field, SecretStr, ValidationError

from agentrl.config.loading import write_config
from agentrl.config.sections import RootConfig, TrainerSection
from agentrl.config.validation.algorithm_checks import READ_BY
from agentrl.distributed import Ranks
from agentrl.errors import ConfigError
from agentrl.runtime.atomic_directory import atomic_directory
from agentrl.schema import Run, task_of_record
from agentrl.schema.base import Value
from agentrl.schema.ledger_origin import LEFT_OUT, Retrain
from agentrl.store import TrajectoryStore
from agentrl.store.views.record_condition import record_condition
from agentrl.trainer.bootstrap import ending_ranks_on_error, run_on_ranks
from agentrl.trainer.checkpoint import (
    Checkpoint,
    checkpoints_root,
    latest_checkpoint,
    link_or_copy,
)
from agentrl.trainer.metrics.metrics_file import rewind_metrics
from agentrl.trainer.rl.replay import config_of_steps
from agentrl.trainer.rl.run_start import start_weights
from agentrl.trainer.rl.training_loop import lead

_DUAL_CLIP = 3.0
"""c of dual-clip PPO, as in verl."""


class RetrainReport(Value):
    """What a retrain left out, and where it arrived."""

    origin: Retrain
    is_stopped: bool = Field(exclude=True)
    """A signal ended it; the same call goes on."""
    steps: list[int]
    """Those that were made again."""
    num_records: int
    """Records that were left out, of `num_groups` groups in `num_steps` steps of the run."""
    num_groups: int
    num_steps: int
    num_emptied_groups: int
    """Groups of which a step had nothing left to train on."""
    emptied_steps: list[int]
    """Steps of which nothing was left."""
    model: Path | None
    """Directory of the last weights; None if no step was made and no checkpoint comes before."""
    held_out: float | None
    """Mean held-out score of the run's last evaluation up to the last step, if there is one."""


def retrain(
    config: RootConfig, uri: str, name: str, output_path: Path, without: str
) -> RetrainReport | None:
    """Make a run's steps again, or go on with that.

    Args:
        config: of the run, as it was trained.
        uri: of the run's database.
        name: of the new trainer and its ledger.
        output_path: its output directory.
        without: condition on the records to leave out; empty: none are.

    Returns:
        The report; None on ranks other than 0.

    Raises:
        ConfigError: the steps cannot be repeated, or the name is taken; nothing was changed.
        StoreError: turns of the steps have expired, or the database does not respond.
    """
    try:
        TrainerSection(consumer=name)
    except ValidationError:
        raise ConfigError(
            f"--run_name {name} names a ledger: use up to 32 lower-case letters, digits and _, the "
            "first a letter"
        ) from None
    own = _Own(_bounded(config) if without else config, uri, name, output_path)

    async def lead_steps(ranks: Ranks, stop: asyncio.Event) -> RetrainReport:
        async with TrajectoryStore.connect(uri, config.run.run_name) as store:
            with ending_ranks_on_error(ranks):
                settings, origin = await own.prepared(store, ranks, without)
            result = await lead(settings, ranks, stop=stop)
            return await own.report(store, origin, is_stopped=result.status == "stopped")

    return run_on_ranks("retrain", config, lead_steps)


def _bounded(config: RootConfig) -> RootConfig:
    """Return a configuration under which no token that became likelier outweighs all others.

    Without some records, the policy is no longer the one that sampled the later ones. A token that it
    has come to prefer, and whose advantage is negative, has an importance ratio that nothing bounds in
    GRPO and GSPO; the other losses truncate it, or have none.
    """
    algorithm = config.algorithm
    if algorithm.loss_calculator not in READ_BY["dual_clip"] or algorithm.dual_clip is not None:
        return config
    bounded = algorithm.model_copy(update={"dual_clip": _DUAL_CLIP})
    return config.model_copy(update={"algorithm": bounded})


class _Own:
    """A retrain's own ledger and output directory, beside those of its run."""

    def __init__(self, config: RootConfig, uri: str, name: str, output_path: Path) -> None:
        self._config = config
        self._uri = uri
        self._source = config.trainer.consumer
        self._name = name
        self._output_path = output_path
        reports = {"eval_strategy": "no", "report_to": (), "on_step": None}
        self._trainer = {"consumer": name, "save_only_model": False, **reports}
        section = {"output_dir": output_path, "metrics_port": None}
        self._run = config.run.model_copy(update=section)

    async def prepared(
        self, store: TrajectoryStore, ranks: Ranks, without: str
    ) -> tuple[RootConfig, Retrain]:
        """Check everything, then write ledger, origin and output directory, unless they are there."""
        run = await store.runs.get()
        if run is None:
            raise ConfigError(f"{store.redacted_uri} contains no run")
        left_out: list[str] = []
        origin = run.retrains.get(self._name)
        if origin is None:
            origin, left_out = await self._new_origin(store, run, without)
        elif (origin.consumer, origin.without) != (self._source, without):
            raise ConfigError(
                f"--run_name {self._name} is a retrain of {origin}; choose another name"
            )
        settings = self._settings(run, origin)
        is_begun, checkpoint = self._output_path.exists(), None
        if not is_begun:
            checkpoint = latest_checkpoint(self._config.run.output_path, at_most=origin.checkpoint)
            if origin.checkpoint != (0 if checkpoint is None else checkpoint.step):
                raise ConfigError(
                    f"{self._config.run.output_path} lost its checkpoint of step {origin.checkpoint}; "
                    "choose another --run_name to start from what is kept"
                )
            start_weights(settings.model, checkpoint, ranks.shape)
        if self._name not in run.retrains:
            await store.ledger.begin_repeating(self._name, origin, left_out)
            await store.runs.note_retrain(self._name, origin)
        if not is_begun:
            await asyncio.to_thread(self._write_start, checkpoint)
        return settings, origin

    async def _new_origin(
        self, store: TrajectoryStore, run: Run, without: str
    ) -> tuple[Retrain, list[str]]:
        """Return what is repeated, and the ids of the records that are left out."""
        taken = {self._source, *run.trainer_leases}
        if self._name in taken or self._output_path.exists():
            raise ConfigError(
                f"--run_name {self._name} ({self._output_path}) exists and is no retrain of "
                f"{run.name}; choose another name"
            )
        condition = record_condition(without) if without else None
        tasks = await store.ledger.tasks_by_step(self._source)
        if not tasks:
            raise ConfigError(f"run {run.name!r} has no step that a checkpoint contains")
        first, left_out = 1, list[str]()
        if condition is not None:
            left_out = await store.reports.matching(condition, sorted(set().union(*tasks.values())))
            groups = {*map(task_of_record, left_out)}
            first = next((step for step, of_step in tasks.items() if of_step & groups), 0)
        if not first:
            raise ConfigError(f"no record of the groups that {run.name} trained on has {without!r}")
        found = latest_checkpoint(self._config.run.output_path, at_most=first - 1)
        start, last = found.step if found is not None and found.has_state else 0, max(tasks)
        stored = await store.ledger.trained_tasks(self._source, start + 1, last)
        for step, of_step in tasks.items():
            if step > start and not of_step.issubset(stored):
                raise ConfigError(f"the turns of step {step} of {run.name} are no longer stored")
        origin = Retrain(
            run=run.name, consumer=self._source, checkpoint=start, last_step=last, without=without
        )
        return origin, left_out

    def _settings(self, run: Run, origin: Retrain) -> RootConfig:
        """Return the configuration of the trainer: what determines a step, and its own names."""
        steps = range(origin.checkpoint + 1, origin.last_step + 1)
        used = config_of_steps(steps, self._config, run, verb="retrain")
        size = {
            "groups_per_step": run.control.groups_per_step,
            "max_steps": max(used.trainer.max_steps, origin.last_step),
        }
        database = {"db_connection_string": SecretStr(self._uri)}
        return RootConfig(
            run=self._run,
            model=used.model,
            store=used.store.model_copy(update=database),
            algorithm=used.algorithm,
            trainer=used.trainer.model_copy(update={**self._trainer, **size}),
        )

    def _write_start(self, checkpoint: Checkpoint | None) -> None:
        config = self._config
        sections = {
            "run": self._run,
            "trainer": config.trainer.model_copy(update=self._trainer),
            "inference": config.inference.model_copy(update={"colocated": False}),
        }
        with atomic_directory(self._output_path) as staging:
            write_config(config.model_copy(update=sections), staging / "config.yaml")
            if checkpoint is not None:
                copy = checkpoints_root(staging) / checkpoint.path.name
                shutil.copytree(checkpoint.path, copy, copy_function=link_or_copy)
                rewind_metrics(staging, checkpoint.history)

    async def report(
        self, store: TrajectoryStore, origin: Retrain, *, is_stopped: bool
    ) -> RetrainReport:
        """Return what the two ledgers say."""
        dropped = store.ledger.find(self._name, status="dropped", step=origin.checkpoint)
        left_out = [
            one.task_id async for one in dropped if one.ledger[self._name].reason == LEFT_OUT
        ]
        tasks = await store.ledger.tasks_by_step(self._source)
        before = {s: tasks[s] for s in tasks if origin.checkpoint < s <= origin.last_step}
        tasks = await store.ledger.tasks_by_step(self._name)
        after = {s: tasks[s] for s in tasks if s > origin.checkpoint}
        scores = await store.figures.evaluations(self._source)
        held_out = [one["reward_mean"] for one in scores if one["version"] <= origin.last_step]
        newest = await asyncio.to_thread(latest_checkpoint, self._output_path)
        return RetrainReport(
            origin=origin,
            is_stopped=is_stopped,
            steps=list(after),
            num_records=len(left_out),
            num_groups=len(set(left_out)),
            num_steps=sum(not of_step.isdisjoint(left_out) for of_step in before.values()),
            num_emptied_groups=sum(len(before[s] - after.get(s, set())) for s in before),
            emptied_steps=[s for s in before if s not in after],
            model=None if newest is None else newest.model_path,
            held_out=held_out[-1] if held_out else None,
        )
