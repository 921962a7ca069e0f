"""Where the weights of a manifest arrive, without a group."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.training import write_moe_model
from transformers import PreTrainedModel

from agentrl.errors import InferenceError
from agentrl.plugins.engine.generation.model_runner import load_model
from agentrl.plugins.engine.weights.weight_receiver import (
    AwaitedTensor,
    WeightManifest,
    awaited_tensors,
)


def manifest(tensors: dict[str, torch.Tensor], dtype: str = "float32") -> WeightManifest:
    shapes = [list(tensor.shape) for tensor in tensors.values()]
    return WeightManifest("group", list(tensors), [dtype] * len(tensors), shapes)


def arrive(awaited: list[AwaitedTensor], tensors: dict[str, torch.Tensor]) -> list[str | None]:
    for tensor in awaited:
        tensor.buffer.copy_(tensors[tensor.name])
    return [tensor.settle() for tensor in awaited]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("experts")
    return write_moe_model(folder / "first"), write_moe_model(folder / "second", seed=5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_tensor_arrives_where_the_model_has_it_in_its_own_precision(
    experts: tuple[Path, Path], dtype: str
) -> None:
    model = load_model(experts[0], torch.float32)
    sent = load_file(experts[1] / "model.safetensors")
    awaited = awaited_tensors(manifest(sent, dtype), model)
    in_place = [tensor.buffer is tensor.place for tensor in awaited]
    assert in_place == [dtype == "float32"] * len(sent)
    assert arrive(awaited, sent) == [None] * len(sent)
    wanted = load_model(experts[1], torch.float32).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_values_that_are_not_finite_are_told(model: PreTrainedModel) -> None:
    name = "model.norm.weight"
    kept = model.state_dict()[name].clone()
    (tensor,) = awaited_tensors(manifest({name: kept}), model)
    for value in (torch.nan, torch.inf):
        tensor.buffer[3] = value
        assert tensor.settle() == f"{name} has values that are not finite"
    tensor.buffer.copy_(kept)
    assert tensor.settle() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ["model.nothing.weight"]}, "the model has no tensor"),
        ({"shapes": [[65]]}, r"has shape \(65,\), the model expects \(64,\)"),
        ({"dtypes": ["float33"]}, "unknown dtype float33"),
        ({"shapes": []}, "non-empty lists of equal length"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    model: PreTrainedModel, changes: dict[str, Any], message: str
) -> None:
    fitting: dict[str, Any] = {
        "names": ["model.norm.weight"],
        "dtypes": ["float32"],
        "shapes": [[64]],
    }
    with pytest.raises(InferenceError, match=message):
        awaited_tensors(WeightManifest("group", **(fitting | changes)), model)
