"""What `agentrl run` would do, without doing it (`--dry_run`).

Input: the configuration and the flags as typed. Output: a plan in parts, as text and as
JSON: every value with its origin, the processes with their GPUs, and the results of the checks of a
real start. Nothing is started or written; of a hub id, only the model's small files are fetched.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.config.loading import origins, values_of
from agentrl.config.sections import SECTIONS, RootConfig
from agentrl.launcher.checks.preflight import Finding
from agentrl.launcher.start import CheckedStart, findings
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

    start: CheckedStart
    origins: Mapping[str, str]
    """Origin of each value, by flag."""
    findings: tuple[Finding, ...]

    @property
    def can_start(self) -> bool:
        """Whether the checks found no problem."""
        return all(finding.problem is None for finding in self.findings)

    def parts(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        return {
            "can_start": self.can_start,
            "configuration": {
                name: {"value": value.shown, "origin": self.origins[name]}
                for name, value in values_of(self.start.config).items()
            },
            "processes": [vars(process) for process in self._processes()],
            "gpus": dict(self.start.gpus.rows()),
            **dict.fromkeys(hooks("run_checks")),
            **{subject: found.parts() for subject, found in self.start.checked.items()},
            "first_question": list(self.start.first_question),
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
        values = values_of(self.start.config)
        for section, cls in SECTIONS.items():
            yield f"{section}:"
            for name in cls.model_fields:
                value = _value_text(values[name].shown)
                yield f"  {name:{_NAME_WIDTH}} {value:{_VALUE_WIDTH}} {self.origins[name]}"
        yield "processes on this machine:"
        for process in self._processes():
            yield f"  {process.count} x {process.name:12} {process.what}"
        rows = dict(self.start.gpus.rows())
        yield "GPUs:" if rows else "GPUs: none"
        for name, text in rows.items():
            yield f"  {name:12} {text}"
        yield from self.start.first_question
        for subject, found in self.start.checked.items():
            yield f"{subject}:"
            yield from (f"  {line}" for line in found.lines())
        yield "checks:"
        for finding in self.findings:
            result = "ok" if finding.problem is None else f"PROBLEM {finding.problem}"
            yield f"  {finding.subject:18} {result}"
            yield from (f"  {'':18} note: {note}" for note in finding.notes)

    def _processes(self) -> Iterator[PlannedProcess]:
        config = self.start.config
        trainer, inference = config.trainer, config.inference
        uri = config.store.db_connection_string
        if uri is None:
            yield PlannedProcess("mongod", 1, f"private, data in {config.private_mongo_dir}")
        if config.rollout.enable_sampling:
            if config.tools.tool_server_command is not None:
                command = config.tools.tool_server_command.public
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
    start = CheckedStart(config)
    found = tuple([one async for one in findings(start, with_weights=False)])
    return RunPlan(start, origins(typed, start.config), found)


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
