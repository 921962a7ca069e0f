"""Figures over target tokens, against values by hand."""

import math

import numpy as np
import pytest
import torch

from agentrl.algorithms.losses import TargetLosses
from agentrl.models.policy import TargetLogprobs
from agentrl.trainer.learner.target_stats import TargetStats, TargetTrace, TurnRatios, target_stats


def trace(
    ratios: list[float], advantages: list[float], clipped: list[bool], kept: list[bool]
) -> TargetTrace:
    logs = torch.tensor(ratios, dtype=torch.float64).log()
    losses = TargetLosses(
        loss=torch.zeros(len(ratios)),
        keep=torch.tensor(kept),
        ratio=logs.exp(),
        clipped=torch.tensor(clipped),
    )
    return TargetTrace.of(
        np.zeros(len(ratios), np.int64),
        TargetLogprobs(logs - 2.0, None),
        torch.full((len(ratios),), -2.0),
        np.array(advantages),
        losses,
        torch.zeros(len(ratios), dtype=torch.bool),
    )


def test_clipping_is_told_by_the_sign_of_the_advantage() -> None:
    found = target_stats(
        trace(
            [1.0, 2.0, 2.0, 0.5, 9.0],
            [1.0, 1.0, 2.0, -1.0, 1.0],
            [False, True, True, True, True],
            [True, True, True, True, False],
        )
    )
    assert found.clip_fraction == pytest.approx(3 / 5)  # the dropped token is not clipped as well
    assert found.clip_fraction_positive == pytest.approx(2 / 4)
    assert found.clip_fraction_negative == 1.0
    assert found.drop_fraction == pytest.approx(1 / 5)


def test_ratios_and_kl_estimates_over_micro_batches_and_ranks() -> None:
    ratios = [0.5, 1.0, 4.0]
    parts = [trace([ratio], [1.0], [False], [True]) for ratio in ratios]
    found = target_stats(TargetTrace.joined([*parts, TargetTrace.joined([])]))
    assert found.ratio_mean == pytest.approx(5.5 / 3)
    assert found.ratio_max == pytest.approx(4.0)
    assert found.ratio_quantiles["p50"] == pytest.approx(1.0)
    assert list(found.ratio_quantiles) == ["p01", "p10", "p50", "p90", "p99"]
    logs = [math.log(ratio) for ratio in ratios]
    assert found.sampler_kl_k1 == pytest.approx(-sum(logs) / 3, rel=1e-6)
    assert found.sampler_kl_k2 == pytest.approx(sum(x * x for x in logs) / 6, rel=1e-6)
    expected = sum(r - 1 - x for r, x in zip(ratios, logs, strict=True)) / 3
    assert found.sampler_kl_k3 == pytest.approx(expected, rel=1e-6)
    assert found.logprob_gap == pytest.approx(sum(map(abs, logs)) / 3, rel=1e-6)


def test_a_step_without_targets_has_no_ratios() -> None:
    assert target_stats(TargetTrace.joined([])) == TargetStats()


def test_no_clipping_is_reported_for_a_sign_that_does_not_occur() -> None:
    assert target_stats(trace([1.0], [1.0], [False], [True])).clip_fraction_negative is None


def test_ratios_are_measured_turn_by_turn_and_joined() -> None:
    losses = TargetLosses(
        loss=torch.zeros(5),
        keep=torch.tensor([True, False, True, True, True]),
        ratio=torch.tensor([1.0, 3.0, 0.5, 1.5, 2.0]),
        clipped=torch.tensor([False, True, True, False, False]),
    )
    masked = torch.tensor([False, False, False, False, False])
    found = TurnRatios.of(np.array([4, 4, 2, 2, 2]), losses, masked)
    assert found.turns.tolist() == [2, 4]
    assert found.num_targets.tolist() == [3, 2]
    assert found.num_dropped.tolist() == [0, 1]
    assert found.num_masked.tolist() == [0, 0]
    assert found.num_clipped.tolist() == [1, 0]  # what is dropped is not clipped as well
    np.testing.assert_allclose(found.mean, [4 / 3, 2.0])
    np.testing.assert_allclose(found.std, [float(np.std([0.5, 1.5, 2.0])), 1.0])
    assert (found.min.tolist(), found.max.tolist()) == ([0.5, 1.0], [2.0, 3.0])
    empty = TurnRatios.of(np.empty(0, dtype=np.int64), TargetLosses(*(torch.empty(0) for _ in range(4)))._replace(
        keep=torch.empty(0, dtype=torch.bool), clipped=torch.empty(0, dtype=torch.bool)
    ), torch.empty(0, dtype=torch.bool))  # fmt: skip
    assert TurnRatios.joined([empty, found]).turns.tolist() == [2, 4]
    assert TurnRatios.joined([]).turns.tolist() == []


def test_a_masked_target_is_counted_once_by_its_reason() -> None:
    losses = TargetLosses(
        loss=torch.zeros(3),
        keep=torch.tensor([False, False, True]),
        ratio=torch.ones(3),
        clipped=torch.tensor([False, False, False]),
    )
    found = TurnRatios.of(np.array([0, 0, 0]), losses, torch.tensor([True, False, False]))
    assert (found.num_dropped.tolist(), found.num_masked.tolist()) == ([1], [1])
