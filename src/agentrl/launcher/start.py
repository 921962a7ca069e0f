"""What a run would start with: the one road of `run`, `eval`, `--dry_run` and `doctor` through all checks.

    placed on GPUs ──> inputs checked ──> fitted to the model ──> GPUs shared ──> checks of plugins

Input: a checked configuration. Output: one finding for each subject, and the configuration with which
the processes start. Nothing is started or written.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.launcher.checks.first_question import first_question_lines
from agentrl.launcher.checks.policy_checks import find_model
from agentrl.launcher.checks.preflight import Finding, finding_of, input_findings
from agentrl.launcher.checks.run_check import CheckRun, RunCheck, run_checks
from agentrl.launcher.cluster.gpu_placement import NO_GPUS, GpuMap, placed
from agentrl.launcher.cluster.gpu_sharing import settled, sharing_by_default
from agentrl.launcher.console.run_report import print_gpus, report_if_slow, say
from agentrl.launcher.model_limits import fitted_to_model


@dataclass
class CheckedStart:
    """A start, as far as its checks have come."""

    config: RootConfig
    """As given, then with all that GPUs, model and memory decide."""
    gpus: GpuMap = NO_GPUS
    sharing: tuple[str, ...] = ()
    """How trainer and servers share GPUs."""
    checked: dict[str, RunCheck] = field(default_factory=dict)
    """What the checks of plugins found out, by subject, without those that do not apply."""
    first_question: tuple[str, ...] = ()
    """How the first question is read; empty without a file, or if a question has a problem."""


async def findings(
    start: CheckedStart,
    *,
    trains: bool = True,
    with_weights: bool = True,
    without: Collection[str] = (),
) -> AsyncIterator[Finding]:
    """Check a start, fill in what the checks decide, and yield the finding of each subject.

    Args:
        start: the start, whose configuration is the given one.
        trains: whether it is one of a training run, and not of an evaluation.
        with_weights: whether to fetch the weights of a hub id, too, and not only its small files.
        without: inputs that are not checked.
    """
    asked = start.config
    yield await finding_of("GPUs", partial(_place, start, trains=trains))
    problems: set[str] = set()
    async for finding in input_findings(
        start.config, trains=trains, with_weights=with_weights, without=without
    ):
        problems |= {finding.subject} if finding.problem else set()
        yield finding
    if "model" not in problems and start.config.agents.evaluated_route is None:
        path = find_model(start.config.model, with_weights=with_weights)
        yield await finding_of("limits", partial(_fit, start, path, trains=trains))
        if trains:
            share = partial(asyncio.to_thread, _share, start, asked, path)
            sharing = await finding_of("sharing", share)
            if sharing.problem or sharing.notes:
                yield sharing
            for subject, check in run_checks().items():
                work = partial(asyncio.to_thread, _check_run, start, subject, check, path)
                found = await finding_of(subject, work)
                if found.problem or found.notes or subject in start.checked:
                    yield found
    if "questions" not in problems:
        file = start.config.data.train_file if trains else start.config.data.eval_file
        start.first_question = tuple(first_question_lines(start.config, file))


async def announced_start(
    console: Console, config: RootConfig, *, trains: bool = True
) -> CheckedStart:
    """Return a checked start, after printing what its user should know; raises the first problem."""
    start, notes = CheckedStart(config), list[str]()
    async with report_if_slow(
        console, "checking the model, the questions and the tool servers ..."
    ):
        async for finding in findings(start, trains=trains):
            if finding.problem is not None:
                raise finding.problem
            # Notes of plugins are for those who plan, and lines of `sharing` stand by themselves.
            if finding.subject not in {"sharing", *run_checks()}:
                notes += finding.notes
    for note in (*notes, *(found.note for found in start.checked.values())):
        say(console, f"note: {note}")
    for line in (*start.sharing, *start.first_question):
        say(console, line)
    print_gpus(console, start.gpus)
    return start


def _place(start: CheckedStart, *, trains: bool) -> None:
    config = sharing_by_default(start.config) if trains else start.config
    start.config, start.gpus = placed(config, trains=trains)


def _fit(start: CheckedStart, path: Path, *, trains: bool) -> list[str]:
    start.config, notes = fitted_to_model(
        start.config,
        path,
        trains_on=start.gpus.trains_on if trains else None,
        samples_on=start.gpus.samples_on(start.config.inference),
    )
    return notes


def _share(start: CheckedStart, asked: RootConfig, path: Path) -> tuple[str, ...]:
    start.config, lines = settled(asked, start.config, path)
    start.sharing = tuple(lines)
    return start.sharing


def _check_run(start: CheckedStart, subject: str, check: CheckRun, path: Path) -> list[str]:
    found = check(start.config, start.gpus, path)
    if found is None or isinstance(found, str):
        return [] if found is None else [found]
    start.checked[subject] = found
    if found.problems:
        raise ConfigError("; ".join(found.problems) + " (`agentrl plan` shows the parts)")
    return []
