import numpy as np
import pytest

from agentrl.algorithms.reductions import Reduction, reduction_kind, target_weights

SEQUENCES = np.array([7, 7, 7, 2])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", [1 / 4] * 4),
        ("sequence_mean", [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        ("sequence_sum", [1 / 2] * 4),
    ],
)
def test_weights_by_hand(kind: Reduction, expected: list[float]) -> None:
    assert target_weights(SEQUENCES, kind=kind).tolist() == pytest.approx(expected)


def test_dr_grpo_divides_by_a_constant_length() -> None:
    weights = target_weights(SEQUENCES, kind="sequence_sum", normalizer_length=100)
    assert weights.tolist() == pytest.approx([1 / 200] * 4)


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "sequence_sum"])
def test_no_targets_have_no_weights(kind: Reduction) -> None:
    assert target_weights(np.empty(0, dtype=np.int64), kind=kind).shape == (0,)


def test_flags_name_the_reduction() -> None:
    kinds = [
        reduction_kind(token_level_loss=token, skip_length_normalization=skip)
        for token, skip in [(True, False), (True, True), (False, False), (False, True)]
    ]
    assert kinds == ["token_mean", "token_mean", "sequence_mean", "sequence_sum"]
