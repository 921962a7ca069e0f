"""The trainer process as `agentrl train` starts it, with every optimizer step noted.

`main([JOURNAL, "--flag=value", ...])` is the whole process; `main_of_own_loop` makes the steps with
the loop of `examples/own_algorithm/own_loop.py`.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.journal import Journal

from agentrl.config.command_line import parse_flags
from agentrl.trainer.bootstrap import WorkerGroup
from agentrl.trainer.checkpoint import Checkpoint, checkpoint_to_resume
from agentrl.trainer.learner.learner import StepOutcome
from agentrl.trainer.rl import run_start, training_loop
from agentrl.trainer.rl.step_groups import GroupReader, StepGroups
from examples.own_algorithm import own_loop


def note_steps(journal: Journal) -> None:
    """Have noted from which step the process goes on, and what each step was made of."""
    read, make = GroupReader.read_step, WorkerGroup.optim_step
    step: dict[str, Any] = {}

    async def read_step(self: GroupReader, number: int, **options: Any) -> StepGroups:
        found = await read(self, number, **options)
        records = {turn.record_id for group in found.groups for turn in group.turns}
        step.update(step=number, records=sorted(records))
        return found

    async def optim_step(self: WorkerGroup, num_done: int) -> StepOutcome:
        outcome = await make(self, num_done)
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
    training_loop.train(parse_flags(flags))
    return 0


def main_of_own_loop(argv: Sequence[str]) -> int:
    """Train with a loop of a user, which goes on whatever the reward is."""

    async def steps(run: training_loop.TrainingRun) -> None:
        await own_loop.learn(run, enough=math.inf)

    training_loop.train_steps = steps
    return main(argv)
