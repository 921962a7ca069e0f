"""A layer of token trees costs a GPU no more calls than the stock layer, however many branches."""

import json

import pytest
from dispatches import KINDS, RESULT, measure


def check(found: dict[str, float]) -> None:
    assert found["per_layer_64"] <= 1.05 * found["per_layer_8"]
    assert found["per_layer_8"] <= 2.5 * found["stock"]


def test_a_layer_dispatches_as_often_as_the_stock_layer() -> None:
    check(measure("default", prompt=40, answer=10))


@pytest.mark.parametrize("kind", KINDS)
def test_committed_counts(kind: str) -> None:
    check(json.loads(RESULT.read_text())[kind])
