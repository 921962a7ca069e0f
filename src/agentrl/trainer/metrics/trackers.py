"""Figures of every step to TensorBoard, W&B, SwanLab, Trackio or MLflow (`--report_to`) and Prometheus.

accelerate's tracker classes send them. This module chooses what they send: figures, and the
sections of the configuration without secrets. What the libraries would collect on their own
(command line, environment, code, usage) is turned off, because it may contain secrets.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import (
    GeneralTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agentrl.config.flags import SETTINGS
from agentrl.config.loading import flat_values
from agentrl.config.sections import RootConfig, RunSection
from agentrl.errors import ConfigError
from agentrl.runtime.telemetry.figure_words import (
    EVAL_FIGURES,
    STEP_FIGURES,
    TRAINER_TOTALS,
    FigureWords,
)
from agentrl.runtime.telemetry.tracker_checks import check_trackers
from agentrl.runtime.telemetry.tracker_login import check_login
from agentrl.trainer.metrics.history import History, StepMetrics

logger = logging.getLogger(__name__)

_SENT_SECTIONS = frozenset({"run", "model", "data", "sampling", "rollout", "algorithm", "trainer"})
"""Sections that trackers receive; addresses and commands are in the others."""
_LAST_STEP_GAUGES = (
    *("reward_mean", "reward_std", "loss", "grad_norm", "learning_rate", "entropy", "kl"),
    *("sampler_kl_k3", "ratio_mean", "ratio_max", "clip_fraction", "drop_fraction"),
    *("merge_tokens", "tokens_per_second", "mfu"),
)


class Trackers:
    """The configured trackers, on rank 0."""

    def __init__(self, trackers: Sequence[GeneralTracker]) -> None:
        self._trackers = trackers

    def log(self, figures: Mapping[str, Any], step: int) -> None:
        """Send the figures of a step.

        A failing tracker does not stop training: the figures are in metrics.jsonl, too.

        Args:
            figures: numbers, or mappings of names to numbers; others are left out.
            step: the step that they belong to.
        """
        values = flat_figures(figures)
        for tracker in self._trackers:
            try:
                tracker.log(values, step=step)
            except Exception as error:  # noqa: BLE001 - every library raises its own exceptions
                logger.warning("%s did not accept step %d: %s", tracker.name, step, error)

    def finish(self) -> None:
        """Send the remaining figures."""
        for tracker in self._trackers:
            tracker.finish()


def open_trackers(config: RootConfig) -> Trackers:
    """Start the trackers of a run; they continue the records of an earlier process of the run."""
    names = check_trackers(config.trainer.report_to)
    if not names:
        return Trackers(())
    check_login(names)
    # accelerate's logger needs the process's rank; an existing process group is kept.
    PartialState()
    started = []
    for name in names:
        tracker = _FACTORIES[name](config.run)
        # Only rank 0 runs this code, so the library's own check is unnecessary.
        tracker.main_process_only = False
        try:
            tracker.start()
            tracker.store_init_configuration(open_values(config))
        except Exception as error:
            raise ConfigError(f"--report_to {name} cannot be started: {error}") from error
        started.append(tracker)
    return Trackers(started)


def open_values(config: RootConfig) -> dict[str, str | int | float | bool]:
    """Return the configuration as plain values, without the sections that may hold secrets."""
    return {
        name: value if isinstance(value, str | int | float | bool) else str(value)
        for name, value in flat_values(config).items()
        if SETTINGS[name].section in _SENT_SECTIONS and value is not None
    }


def flat_figures(figures: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a nested mapping under names with slashes."""
    flat: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            flat |= flat_figures(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            flat[f"{prefix}{name}"] = value
    return flat


def _tensorboard(run: RunSection) -> GeneralTracker:
    return TensorBoardTracker("tensorboard", logging_dir=str(run.output_path))


def _wandb(run: RunSection) -> GeneralTracker:
    settings = {
        "x_disable_meta": True,
        "x_disable_stats": True,
        "disable_git": True,
        "disable_code": True,
        "console": "off",
    }
    return WandBTracker(
        os.environ.get("WANDB_PROJECT", "agentrl"),
        name=run.run_name,
        id=run.run_name,
        resume="allow",
        dir=str(_folder(run, "wandb")),
        settings=settings,
    )


def _swanlab(run: RunSection) -> GeneralTracker:
    import swanlab  # noqa: PLC0415 - an optional package

    disabled_probes = dict.fromkeys(
        ("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor"), False
    )
    settings = swanlab.Settings(probe=disabled_probes, terminal={"proxy_type": "none"})
    return SwanLabTracker(
        os.environ.get("SWANLAB_PROJECT", "agentrl"),
        name=run.run_name,
        id=run.run_name,
        resume="allow",
        log_dir=str(_folder(run, "swanlab")),
        settings=settings,
    )


def _trackio(run: RunSection) -> GeneralTracker:
    return TrackioTracker(
        os.environ.get("TRACKIO_PROJECT", "agentrl"),
        name=run.run_name,
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )


def _mlflow(run: RunSection) -> GeneralTracker:
    folder = _folder(run, "mlflow")
    for name, value in {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # By default, an unreachable server blocks the trainer for minutes at every step.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    }.items():
        os.environ.setdefault(name, value)
    is_local = os.environ["MLFLOW_TRACKING_URI"].startswith("sqlite:")
    return _ResumedMLflow(
        "agentrl",
        run_name=run.run_name,
        logging_dir=str(folder / "artifacts") if is_local else None,
    )


class _ResumedMLflow(MLflowTracker):  # type: ignore[misc]
    """Continues the run of this name, which MLflow itself finds only by id."""

    run_id: str | None

    def start(self) -> None:
        import mlflow  # noqa: PLC0415 - an optional package

        client = mlflow.MlflowClient()
        experiment = client.get_experiment_by_name(self.experiment_name)
        if experiment is not None and self.run_id is None:
            found = client.search_runs(
                [experiment.experiment_id],
                f"attributes.run_name = '{self.run_name}'",
                max_results=1,
            )
            self.run_id = found[0].info.run_id if found else None
        super().start()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        # MLflow refuses changed parameters, and the flags of a resumed run may have changed.
        existing = self.active_run.data.params
        super().store_init_configuration(
            {name: value for name, value in values.items() if name not in existing}
        )


def _folder(run: RunSection, name: str) -> Path:
    folder = run.output_path / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


_FACTORIES: dict[str, Callable[[RunSection], GeneralTracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "swanlab": _swanlab,
    "trackio": _trackio,
    "mlflow": _mlflow,
}


def trainer_metrics(history: History) -> Iterator[Metric]:
    """Yield the Prometheus metrics of a run so far: its totals and the figures of its last step."""
    steps = tuple(history.steps)
    # Read from the copy, like all figures of steps, because another thread may add a step.
    yield _gauge("step", TRAINER_TOTALS["step"], steps[-1].step if steps else 0)
    yield _counter("groups", history.groups_consumed)
    yield _counter("trained_tokens", _sum(steps, "num_trained_tokens"))
    yield _counter("forward_tokens", _sum(steps, "num_forward_tokens"))
    yield _labeled_counter("masked_tokens", "reason", _masked_tokens(steps))
    yield _labeled_counter("dropped_records", "reason", history.dropped())
    yield _labeled_counter("staleness_records", "versions", history.staleness())
    yield _labeled_counter("seconds", "phase", dict(history.seconds))
    if steps:
        for name in _LAST_STEP_GAUGES:
            value = getattr(steps[-1], name)
            if value is not None:
                yield _gauge(name, STEP_FIGURES[name], value)
    if history.evals:
        last = history.evals[-1]
        yield _gauge("eval_reward_mean", EVAL_FIGURES["reward_mean"], last.reward_mean)


def _masked_tokens(steps: tuple[StepMetrics, ...]) -> Counter[str]:
    total: Counter[str] = Counter()
    for step in steps:
        total.update(step.masked_tokens)
    return total


def _sum(steps: tuple[StepMetrics, ...], name: str) -> int:
    return sum(getattr(step, name) for step in steps)


def _gauge(name: str, words: FigureWords, value: float) -> Metric:
    return GaugeMetricFamily(f"agentrl_trainer_{name}", words.meaning, value=value)


def _counter(name: str, value: float) -> Metric:
    return CounterMetricFamily(f"agentrl_trainer_{name}", TRAINER_TOTALS[name].meaning, value=value)


def _labeled_counter(name: str, label: str, values: Mapping[Any, float]) -> Metric:
    text = TRAINER_TOTALS[name].meaning
    family = CounterMetricFamily(f"agentrl_trainer_{name}", text, labels=[label])
    for key, value in tuple(values.items()):
        family.add_metric([str(key)], value)
    return family
