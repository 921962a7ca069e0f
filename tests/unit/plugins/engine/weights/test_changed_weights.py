"""Changes of weights on their way into a model that serves."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.fuzzing import TryCases
from support.training import write_moe_model
from transformers import PreTrainedModel

from agentrl.errors import InferenceError
from agentrl.models.weight_delta import (
    DELTA_FILE,
    TensorChange,
    TensorChecksum,
    WeightDelta,
    change_between,
    write_delta,
)
from agentrl.plugins.engine.generation.model_runner import load_model
from agentrl.plugins.engine.weights.changed_weights import (
    apply_changes,
    check_base,
    read_changes,
)
from agentrl.plugins.engine.weights.live_weights import swap_weights

NORM, WEIGHTS = "model.norm.weight", "model.safetensors"
Tensors = dict[str, torch.Tensor]


def stepped(tensors: Tensors, share: float) -> Tensors:
    """Return the weights after a step that changes a share of the values."""
    torch.manual_seed(3)
    return {
        name: torch.where(torch.rand_like(one) < share, one + 0.5, one)
        for name, one in tensors.items()
    }


def delta_of(old: Tensors, new: Tensors, base: str | None = "4") -> WeightDelta:
    found = {name: change_between(old[name], one) for name, one in new.items()}
    changes = {name: change for name, change in found.items() if change is not None}
    return WeightDelta(base, changes, {name: TensorChecksum.of(one) for name, one in new.items()})


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe_model(tmp_path_factory.mktemp("experts") / "model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.01, 0.9])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_the_model_gets_the_very_bits_of_the_new_version(
    checkpoint: Path, experts: Path, tmp_path: Path, kind: str, share: float, dtype: torch.dtype
) -> None:
    path = checkpoint if kind == "dense" else experts
    model = load_model(path, torch.float32)
    old = {n: t.to(dtype) for n, t in load_file(path / "model.safetensors").items()}
    swap_weights(model, old)
    new = stepped(old, share)
    delta = delta_of(old, new)
    assert (delta.num_bytes < 0.05 * sum(one.nbytes for one in new.values())) == (share < 0.5)
    write_delta(delta, tmp_path / "delta")
    read = read_changes(tmp_path / "delta", model)
    check_base(read, "4")
    changed = apply_changes(read, model)
    assert len(changed) == len(delta.changes)
    (tmp_path / "new").mkdir()
    model.save_pretrained(tmp_path / "new")
    kept = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(kept[name], one.float()) for name, one in new.items())


def test_changes_since_another_version_are_refused(model: PreTrainedModel) -> None:
    delta = WeightDelta("4", {}, {})
    with pytest.raises(
        InferenceError, match="relative to version 4, but the weights are those of 3"
    ):
        check_base(delta, "3")
    check_base(replace(delta, base=None), "3")


def test_a_result_that_is_not_what_was_published_is_refused(
    checkpoint: Path, model: PreTrainedModel
) -> None:
    old = load_file(checkpoint / "model.safetensors")
    delta = delta_of(old, stepped(old, 0.01))
    with torch.no_grad():
        model.get_parameter(NORM)[0] += 1e-3  # not the version that the changes are based on
    delta = replace(delta, changes={k: v for k, v in delta.changes.items() if k != NORM})
    with pytest.raises(InferenceError, match="its checksum does not match"):
        apply_changes(delta, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (TensorChange(torch.ones(1), torch.tensor([64], dtype=torch.int32)), "is outside of"),
        (TensorChange(torch.ones(1), torch.tensor([-1], dtype=torch.int32)), "is outside of"),
        (
            TensorChange(torch.ones(2), torch.tensor([1], dtype=torch.int32)),
            "positions and values do not match",
        ),
        (TensorChange(torch.ones(1), torch.tensor([1])), "positions and values do not match"),
        (TensorChange(torch.ones(65)), "the model expects"),
        (TensorChange(torch.ones(64, dtype=torch.float64)), "changes are float64, but the weights"),
        (TensorChange(torch.full((64,), torch.nan)), "not finite"),
        (TensorChange(torch.ones(64, dtype=torch.float8_e4m3fn)), "not a weight precision"),
        (TensorChange(torch.ones(64, dtype=torch.complex64)), "not a weight precision"),
    ],
)
def test_changes_that_do_not_fit_are_refused_and_change_nothing(
    checkpoint: Path, model: PreTrainedModel, tmp_path: Path, change: TensorChange, message: str
) -> None:
    before = model.get_parameter(NORM).clone()
    sums = {n: TensorChecksum.of(t) for n, t in load_file(checkpoint / "model.safetensors").items()}
    write_delta(WeightDelta("4", {NORM: change}, sums), tmp_path / "delta")
    with pytest.raises(InferenceError, match=message):
        read_changes(tmp_path / "delta", model)
    assert torch.equal(model.get_parameter(NORM), before)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda d: replace(d, changes={"model.x": TensorChange(torch.ones(1))}),
            "no tensor model.x",
        ),
        (lambda d: replace(d, checksums={}), "lacks the tensor"),
        (
            lambda d: replace(
                d, checksums={**d.checksums, "model.x": next(iter(d.checksums.values()))}
            ),
            "no tensor model.x",
        ),
    ],
)
def test_a_delta_of_another_model_is_refused(
    checkpoint: Path,
    model: PreTrainedModel,
    tmp_path: Path,
    spoil: Callable[[WeightDelta], WeightDelta],
    message: str,
) -> None:
    old = load_file(checkpoint / "model.safetensors")
    write_delta(spoil(delta_of(old, stepped(old, 0.01))), tmp_path / "delta")
    with pytest.raises(InferenceError, match=message):
        read_changes(tmp_path / "delta", model)


def test_a_change_of_no_value_is_none(
    checkpoint: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    sums = {n: TensorChecksum.of(t) for n, t in load_file(checkpoint / WEIGHTS).items()}
    nothing = TensorChange(torch.ones(0), torch.ones(0, dtype=torch.int32))
    write_delta(WeightDelta("4", {NORM: nothing}, sums), tmp_path / "delta")
    apply_changes(read_changes(tmp_path / "delta", model), model)


@pytest.mark.parametrize(
    "checksums", ["[" * 100_000, '{"x": [1, "quint8"]}', '{"x": [1e999, "float32"]}']
)
def test_checksums_that_make_no_sense_are_refused(
    model: PreTrainedModel, tmp_path: Path, checksums: str
) -> None:
    save_file({}, tmp_path / DELTA_FILE, metadata={"checksums": checksums})
    with pytest.raises(InferenceError, match=r"no weight changes|not a weight precision"):
        read_changes(tmp_path, model)


INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]
DTYPES = st.sampled_from([*INTEGERS, *FLOATS, torch.complex64])
SHAPES = st.lists(st.sampled_from([0, 1, 2, 64]), max_size=3)
TEXTS = st.text(max_size=8) | st.sampled_from(["float32", "complex64", "quint8", "nn", "save"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CHECKSUMS = JSON | st.dictionaries(
    st.just(NORM) | TEXTS, st.tuples(st.integers() | JSON, TEXTS | JSON), max_size=3
)


@pytest.mark.fuzz(40)
def test_any_file_is_applied_or_refused_and_then_changes_nothing(
    checkpoint: Path, model: PreTrainedModel, tmp_path: Path, try_cases: TryCases
) -> None:
    before = {name: one.clone() for name, one in model.named_parameters()}
    sums = {n: astuple(TensorChecksum.of(t)) for n, t in load_file(checkpoint / WEIGHTS).items()}

    def check(
        kinds: set[str],
        dtypes: tuple[torch.dtype, torch.dtype],
        shapes: tuple[list[int], list[int]],
        checksums: Any,
        flipped: dict[int, int],
    ) -> None:
        tensors = {
            f"{kind}/{NORM}": torch.zeros(shape, dtype=dtype)
            for kind, shape, dtype in zip(sorted(kinds), shapes, dtypes, strict=False)
        }
        about = {"base": "4", "checksums": json.dumps(sums if checksums is None else checksums)}
        save_file(tensors, tmp_path / DELTA_FILE, metadata=about)
        content = bytearray((tmp_path / DELTA_FILE).read_bytes())
        for place, value in flipped.items():
            content[place % len(content)] = value
        (tmp_path / DELTA_FILE).write_bytes(content)
        with suppress(InferenceError):
            read_changes(tmp_path, model)
        for name, one in model.named_parameters():
            assert torch.equal(one, before[name])

    try_cases(
        check,
        kinds=st.sets(st.sampled_from(["whole", "positions", "values"]), max_size=2),
        dtypes=st.tuples(DTYPES, DTYPES),
        shapes=st.tuples(SHAPES, SHAPES),
        checksums=st.none() | CHECKSUMS,
        flipped=st.dictionaries(st.integers(0, 500), st.integers(0, 255), max_size=2),
    )
