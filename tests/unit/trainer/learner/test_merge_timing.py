"""Timing measures what it should, and leaves gradients and random states as they were."""

from collections.abc import Iterator, Sequence

import torch
from harness.trees import NO_AUTOCAST, flat_gradient, random_group, tiny_policy

from agentrl.config.sections import AlgorithmSection
from agentrl.data import build_step
from agentrl.data.batch import MicroBatch
from agentrl.data.rows import Merge
from agentrl.distributed import Ranks
from agentrl.models.policy import PolicyModel
from agentrl.trainer.learner.merge_timing import packing_seconds
from agentrl.trainer.learner.passes import forward_backward

torch.set_num_threads(1)
GROUP = random_group(5)


def step(merge: Merge) -> Sequence[MicroBatch]:
    return build_step([GROUP], policy_version=3, token_budget=10**6, merge=merge).micro_batches[0]


def accumulate(policy: PolicyModel, batches: Sequence[MicroBatch]) -> None:
    for batch in batches:
        forward_backward(policy, batch, AlgorithmSection(), chunk_size=64, autocast=NO_AUTOCAST)
        torch.rand(1)  # as dropout would


def times(policy: PolicyModel, clock: Iterator[float]) -> list[float]:
    return packing_seconds(
        policy,
        [step("tree"), step("packed")],
        accumulate=lambda batches: accumulate(policy, batches),
        ranks=Ranks(),
        clock=lambda: next(clock),
    )


def test_the_fastest_pass_after_the_first_counts() -> None:
    # The packings take turns; the first passes warm up.
    spent = [1.0, 1.0, 3.0, 5.0, 2.0, 7.0]
    readings = iter([reading for seconds in spent for reading in (10.0, 10.0 + seconds)])
    assert times(tiny_policy(), readings) == [2.0, 5.0]


def test_gradients_and_random_numbers_are_those_of_a_step_without_timing() -> None:
    def gradient_and_random(*, timed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        policy = tiny_policy()
        torch.manual_seed(1)
        accumulate(policy, step("tree")[:1])
        if timed:
            times(policy, iter(map(float, range(100))))
        accumulate(policy, step("tree"))
        return flat_gradient(policy), torch.rand(4)

    for one, other in zip(
        gradient_and_random(timed=True), gradient_and_random(timed=False), strict=True
    ):
        assert torch.equal(one, other)
