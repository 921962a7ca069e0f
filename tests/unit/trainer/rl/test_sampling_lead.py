"""How far samplers may run ahead of a trainer, whose pace and theirs are given."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from agentrl.schema import Control
from agentrl.trainer.rl.sampling_lead import Admission, SamplingLead

PER_STEP = 4


def test_samplers_bring_what_the_steps_ahead_use_up() -> None:
    def bound(max_staleness: int, lead: float = math.inf) -> int:
        control = Control(groups_per_step=PER_STEP, max_staleness=max_staleness)
        admission = Admission(groups_consumed=10, step=5, control=control, lead=lead)
        return admission.bound(max_steps=9)

    assert [bound(staleness) for staleness in (0, 1, 2, 9)] == [14, 18, 22, 30]
    # Within the bound, the lead decides.
    assert [bound(9, lead) for lead in (0, 3, 12, 99)] == [14, 17, 26, 30]
    assert [bound(1, lead) for lead in (0, 3, 12)] == [14, 17, 18]


@dataclass
class Pipeline:
    """A fleet that takes a group after the other and ends each `latency` later, and a trainer."""

    step_seconds: float
    group_seconds: float
    latency: float
    max_staleness: int
    now: float = 0.0
    admitted: int = 0
    consumed: int = 0
    step: int = 0
    ends: list[tuple[float, int]] = field(default_factory=list)
    """When each group is complete, and the version of the weights that it began with."""
    fleet_free_at: float = 0.0

    def __post_init__(self) -> None:
        self.lead = SamplingLead(clock=lambda: self.now)
        self.admit()

    def admit(self) -> None:
        control = Control(groups_per_step=PER_STEP, max_staleness=self.max_staleness)
        admission = Admission(self.consumed, self.step + 1, control, self.lead.groups)
        for _ in range(self.admitted, bound := admission.bound(10_000)):
            begun = max(self.now, self.fleet_free_at)
            self.fleet_free_at = begun + self.group_seconds
            self.ends.append((begun, self.step))
        self.admitted = max(self.admitted, bound)

    def steps(self, number: int, pause: float = 0.0) -> tuple[float, list[int]]:
        """Make some steps, the first after a pause; return how long they waited, and their ages."""
        waited, ages = 0.0, []
        self.now += pause
        for _ in range(number):
            taken = self.ends[self.consumed : self.consumed + PER_STEP]
            ready_at = max(begun + self.latency for begun, _ in taken)
            wait = max(0.0, ready_at - self.now)
            self.now += wait
            waited += wait
            self.consumed += PER_STEP
            left = [begun for begun, _ in self.ends[self.consumed :]]
            self.lead.note(
                num_taken=PER_STEP,
                num_left=sum(begun + self.latency <= self.now for begun in left),
                waited_seconds=wait,
                groups_per_step=PER_STEP,
                most=self.max_staleness * PER_STEP,
            )
            ages += [self.step - version for _, version in taken]
            self.now += self.step_seconds
            self.step += 1
            self.admit()
        return waited, ages


@pytest.mark.parametrize(("latency", "steps_needed"), [(1.0, 1), (8.0, 1), (15.0, 2), (28.0, 3)])
def test_samplers_run_as_far_ahead_as_a_trainer_needs_that_never_waits(
    latency: float, steps_needed: int
) -> None:
    pipeline = Pipeline(step_seconds=10.0, group_seconds=0.5, latency=latency, max_staleness=6)
    _, began = pipeline.steps(6)
    pipeline.steps(40)
    waited, ages = pipeline.steps(40)
    assert waited <= 0.02 * 40 * 10.0
    assert sum(ages) / len(ages) < steps_needed + 1
    assert max(began) == pipeline.max_staleness - 1


def test_samplers_that_are_slower_than_the_trainer_are_never_held_up() -> None:
    pipeline = Pipeline(step_seconds=1.0, group_seconds=3.0, latency=5.0, max_staleness=4)
    pipeline.steps(30)
    begun = [begun for begun, _ in pipeline.ends]
    assert max(after - before for before, after in pairwise(begun)) == 3.0


def test_a_pause_of_the_trainer_leaves_the_lead_as_it_was() -> None:
    pipeline = Pipeline(step_seconds=10.0, group_seconds=0.5, latency=15.0, max_staleness=6)
    pipeline.steps(60)
    before = pipeline.lead.groups
    # Nothing was admitted during the pause, so that two steps wait for what follows it.
    waited, _ = pipeline.steps(40, pause=500.0)
    assert waited <= 2 * pipeline.latency
    assert abs(pipeline.lead.groups - before) <= PER_STEP
