"""The trainer process as `agentrl train` starts it, with every optimizer step noted.

`main([JOURNAL, "--flag=value", ...])` is the whole process.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.journal import Journal

from agentrl.config.command_line import parse_flags
from agentrl.trainer.bootstrap import WorkerGroup
from agentrl.trainer.checkpoint import Checkpoint, checkpoint_to_resume
from agentrl.trainer.learner.learner import StepOutcome
from agentrl.trainer.rl import run_start
from agentrl.trainer.rl.step_groups import GroupReader, StepGroups
from agentrl.trainer.rl.training_loop import train as train_run


def note_steps(journal: Journal) -> None:
    """Have noted from which step the process goes on, and what each step was made of."""
    read, make = GroupReader.read_step, WorkerGroup.optim_step
    step: dict[str, Any] = {}

    async def read_step(self: GroupReader, number: int, **options: Any) -> StepGroups:
        found = await read(self, number, **options)
        records = {turn.record_id for group in found.groups for turn in group.turns}
        step.update(step=number, records=sorted(records))
        return found

    async def optim_step(self: WorkerGroup) -> StepOutcome:
        outcome = await make(self)
        journal.write("step", **step)
        return outcome

    def checkpoint(output_path: Path) -> Checkpoint | None:
        found = checkpoint_to_resume(output_path)
        journal.write("resume", step=found.step if found else 0)
        return found

    for place, name, noted in (
        (run_start, "checkpoint_to_resume", checkpoint),
        (GroupReader, "read_step", read_step),
        (WorkerGroup, "optim_step", optim_step),
    ):
        setattr(place, name, noted)


def main(argv: Sequence[str]) -> int:
    """Train."""
    journal, *flags = argv
    note_steps(Journal(Path(journal)))
    train_run(parse_flags(flags))
    return 0
