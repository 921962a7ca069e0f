"""The self-check finds what it is there to find."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from harness.trees import NO_AUTOCAST, random_group, tiny_policy

from agentrl.config.sections import AlgorithmSection
from agentrl.data import build_step
from agentrl.data.batch import MicroBatch
from agentrl.data.rows import Merge
from agentrl.distributed import Ranks
from agentrl.models.policy import PolicyModel
from agentrl.trainer.learner.merge_check import MergeCheck, check_merge
from agentrl.trainer.learner.passes import forward_backward

torch.set_num_threads(1)
GROUP = random_group(3)


def step(merge: Merge, token_budget: int = 10**6) -> Sequence[MicroBatch]:
    return build_step(
        [GROUP], policy_version=3, token_budget=token_budget, merge=merge
    ).micro_batches[0]


def checked(
    policy: PolicyModel, merged: Sequence[MicroBatch], tolerance: float = 1e-12
) -> MergeCheck:
    def accumulate(batches: Sequence[MicroBatch]) -> float:
        options: dict[str, Any] = {"chunk_size": 64, "autocast": NO_AUTOCAST}
        algorithm = AlgorithmSection()
        return sum(forward_backward(policy, b, algorithm, **options).loss for b in batches)

    return check_merge(
        policy, merged, step("none"), accumulate=accumulate, tolerance=tolerance, ranks=Ranks()
    )


@pytest.mark.parametrize("token_budget", [10**6, 12])
def test_merged_rows_pass(token_budget: int) -> None:
    policy = tiny_policy()
    found = checked(policy, step("tree", token_budget))
    assert found.is_equal
    assert found.loss_merged == pytest.approx(found.loss_separate, rel=1e-12)
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_a_wrong_row_is_found_and_its_parameters_named() -> None:
    (batch,) = step("tree")
    wrong = replace(batch, row=replace(batch.row, positions=np.arange(batch.row.num_tokens)))
    found = checked(tiny_policy(), [wrong])
    assert not found.is_equal
    report = found.to_json()
    assert report["relative_error"] > 1e-3
    assert max(report["worst"].values()) > 1e-3


def test_not_a_number_is_not_equal() -> None:
    (batch,) = step("tree")
    wrong = replace(batch, weights=np.full_like(batch.weights, np.nan))
    assert not checked(tiny_policy(), [wrong]).is_equal
