"""What `agentrl run` would do, without doing it (`--dry_run`).

Input: the configuration and the flags as typed. Output: a plan in parts, as text and as
JSON: every value with its origin, the processes with their GPUs, and the results of the checks of a
real start. Nothing is started or written; of a hub id, only the model's small files are fetched.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from agentrl.config.flags import SETTINGS
from agentrl.config.loading import flat_values, origins
from agentrl.config.secrets import HIDDEN
from agentrl.config.sections import SECTIONS, RootConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.launcher.checks.first_question import first_question_lines
from agentrl.launcher.checks.policy_checks import find_model
from agentrl.launcher.checks.preflight import Finding, findings
from agentrl.launcher.checks.run_check import RunCheck, run_checks
from agentrl.launcher.cluster.gpu_placement import NO_GPUS, GpuMap, placed
from agentrl.launcher.cluster.gpu_sharing import settled, sharing_by_default
from agentrl.launcher.model_limits import fitted_to_model
from agentrl.plugin_registry import hooks
from agentrl.runtime.printable import counted

_NAME_WIDTH = 34
_VALUE_WIDTH = 24


@dataclass(frozen=True)
class PlannedProcess:
    """One kind of process of a run on this machine."""

    name: str
    count: int
    what: str


@dataclass(frozen=True)
class RunPlan:
    """The parts of a plan."""

    config: RootConfig
    origins: Mapping[str, str]
    """Origin of each value, by flag."""
    gpus: GpuMap
    findings: tuple[Finding, ...]
    checked: Mapping[str, RunCheck | None] = field(default_factory=dict)
    """What the checks of plugins found out, by subject; None of those that do not apply."""
    first_question: tuple[str, ...] = ()
    """How the first question is read; empty without a file, or if a question has a problem."""

    @property
    def can_start(self) -> bool:
        """Whether the checks found no problem."""
        return all(finding.problem is None for finding in self.findings)

    def parts(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        values = _values(self.config)
        return {
            "can_start": self.can_start,
            "configuration": {
                name: {"value": value, "origin": self.origins[name]}
                for name, value in values.items()
            },
            "processes": [vars(process) for process in self._processes()],
            "gpus": dict(self.gpus.rows()),
            **{
                subject: None if found is None else found.parts()
                for subject, found in self.checked.items()
            },
            "first_question": list(self.first_question),
            "checks": [
                {
                    "subject": finding.subject,
                    "problem": None if finding.problem is None else str(finding.problem),
                    "notes": list(finding.notes),
                }
                for finding in self.findings
            ],
        }

    def lines(self) -> Iterator[str]:
        """Yield the plan as text lines; the most important come last, next to the prompt."""
        values = _values(self.config)
        for section, cls in SECTIONS.items():
            yield f"{section}:"
            for name in cls.model_fields:
                value = _value_text(values[name])
                yield f"  {name:{_NAME_WIDTH}} {value:{_VALUE_WIDTH}} {self.origins[name]}"
        yield "processes on this machine:"
        for process in self._processes():
            yield f"  {process.count} x {process.name:12} {process.what}"
        rows = dict(self.gpus.rows())
        yield "GPUs:" if rows else "GPUs: none"
        for name, text in rows.items():
            yield f"  {name:12} {text}"
        yield from self.first_question
        for subject, found in self.checked.items():
            if found is not None:
                yield f"{subject}:"
                yield from (f"  {line}" for line in found.lines())
        yield "checks:"
        for finding in self.findings:
            result = "ok" if finding.problem is None else f"PROBLEM {finding.problem}"
            yield f"  {finding.subject:18} {result}"
            yield from (f"  {'':18} note: {note}" for note in finding.notes)

    def _processes(self) -> Iterator[PlannedProcess]:
        config = self.config
        trainer, inference = config.trainer, config.inference
        uri = config.store.db_connection_string
        if uri is None:
            yield PlannedProcess("mongod", 1, f"private, data in {config.private_mongo_dir}")
        if config.rollout.enable_sampling:
            if config.tools.tool_server_command is not None:
                command = flat_values(config)["tool_server_command"]
                yield PlannedProcess("tool server", 1, command)
            if inference.inference_urls:
                yield PlannedProcess("serve", 1, "supervises --inference_urls")
            else:
                what = f"starts and supervises one server ({inference.inference_backend})"
                yield PlannedProcess("serve", inference.num_inference_servers, what)
            rollouts = config.rollout.max_concurrent_samples_per_process
            what = f"up to {counted(rollouts, 'rollout')} at a time in each"
            yield PlannedProcess("sampler", config.rollout.num_samplers, what)
        ranks = trainer.num_processes
        what = f"of {ranks} ranks" if ranks > 1 else "one process"
        yield PlannedProcess("trainer", ranks, what)


async def plan_run(config: RootConfig, typed: Mapping[str, Any]) -> RunPlan:
    """Run the checks of a real start, and return the resulting plan."""
    found: list[Finding] = []
    gpus = NO_GPUS
    checked: dict[str, RunCheck | None] = dict.fromkeys(hooks("run_checks"))
    asked = config
    try:
        config, gpus = placed(sharing_by_default(config))
        found.append(Finding("GPUs"))
    except AgentRLError as error:
        found.append(Finding("GPUs", error))
    found += [finding async for finding in findings(config, with_weights=False)]
    if not any(finding.problem for finding in found if finding.subject == "model"):
        path = find_model(config.model, with_weights=False)
        config, notes = fitted_to_model(
            config,
            path,
            trains_on=gpus.trains_on,
            samples_on=gpus.samples_on(config.inference),
        )
        found.append(Finding("limits", notes=tuple(notes)))
        try:
            config, lines = await asyncio.to_thread(settled, asked, config, path)
            found += [Finding("sharing", notes=tuple(lines))] if lines else []
        except AgentRLError as error:
            found.append(Finding("sharing", error))
        checked |= await asyncio.to_thread(_checked, config, gpus, path, found)
    are_read = any(one.subject == "questions" and one.problem is None for one in found)
    first = first_question_lines(config, config.data.train_file) if are_read else []
    return RunPlan(config, origins(typed, config), gpus, tuple(found), checked, tuple(first))


def _checked(
    config: RootConfig, gpus: GpuMap, path: Path, findings: list[Finding]
) -> dict[str, RunCheck]:
    """Return what the checks of plugins found out, and append their findings to `findings`."""
    checked = {}
    for subject, check in run_checks().items():
        try:
            found = check(config, gpus, path)
        except AgentRLError as error:
            findings.append(Finding(subject, error))
            continue
        if isinstance(found, str):
            findings.append(Finding(subject, notes=(found,)))
        elif found is not None:
            problem = ConfigError("; ".join(found.problems)) if found.problems else None
            findings.append(Finding(subject, problem))
            checked[subject] = found
    return checked


def _values(config: RootConfig) -> dict[str, Any]:
    """Return all values by flag name, JSON-compatible, with `***` for secrets."""
    public = flat_values(config)
    values = {}
    for name, flag in SETTINGS.items():
        # `flat_values` omits secrets, flags that apply to this start only, and what each machine
        # derives for itself.
        value = getattr(getattr(config, flag.section), name)
        shown = HIDDEN if isinstance(value, SecretStr) else value
        values[name] = shown if public.get(name) is None else public[name]
    return values


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
