"""What changed between two versions, written and read again."""

from pathlib import Path

import pytest
import torch

from agentrl.errors import ConfigError
from agentrl.models.weight_delta import (
    DELTA_FILE,
    TensorChecksum,
    WeightDelta,
    change_between,
    read_delta,
    write_delta,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_few_changed_values_travel_with_their_positions(tmp_path: Path, dtype: torch.dtype) -> None:
    old = torch.randn(30, 10).to(dtype)
    new = old.clone()
    new[2, 3], new[29, 9] = 7.0, -7.0
    change = change_between(old, new)
    assert change is not None
    assert change.num_bytes == 2 * (4 + dtype.itemsize)
    write_delta(WeightDelta("11", {"w": change}, {"w": TensorChecksum.of(new)}), tmp_path / "delta")
    found = read_delta(tmp_path / "delta")
    assert (found.base, found.checksums) == ("11", {"w": TensorChecksum.of(new)})
    read = found.changes["w"]
    assert read.positions is not None
    assert read.positions.tolist() == [23, 299]
    assert torch.equal(read.values, torch.tensor([7.0, -7.0], dtype=dtype))


def test_a_tensor_that_changed_nearly_everywhere_travels_whole(tmp_path: Path) -> None:
    old, new = torch.zeros(8, 8), torch.ones(8, 8)
    change = change_between(old, new)
    assert change is not None
    assert change.positions is None
    write_delta(WeightDelta(None, {"w": change}, {"w": TensorChecksum.of(new)}), tmp_path / "delta")
    found = read_delta(tmp_path / "delta")
    assert found.base is None
    assert torch.equal(found.changes["w"].values, new)


def test_values_are_compared_bit_by_bit() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0, 2.0])
    assert change_between(old, old.clone()) is None
    change = change_between(old, torch.tensor([-0.0, float("nan"), 1.0, 2.0]))
    assert change is not None
    assert change.positions is not None
    assert change.positions.tolist() == [0]


def test_a_checksum_tells_where_a_value_stands() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    assert TensorChecksum.of(one) != TensorChecksum.of(other)
    assert TensorChecksum.of(torch.eye(3).T) == TensorChecksum.of(torch.eye(3))


@pytest.mark.parametrize("content", [None, b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
def test_what_is_no_delta_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / DELTA_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match="holds no weight changes"):
        read_delta(tmp_path)
