"""Every mesh of gloo ranks computes what one process computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gloo_ranks import run_ranks
from support.mesh_run import TRAINER, three_steps
from support.training import write_moe_model

from agentrl.distributed import Ranks

pytestmark = pytest.mark.timeout(300)

TWO: list[dict[str, Any]] = [
    {},
    {"dp_replicate": 2},
    {"tp": 2},
    {"cp": 2},
    {"cpu_offload": True},
]
ADAPTER: dict[str, Any] = {"lora_rank": 4}
FOUR: list[dict[str, Any]] = [
    {"dp_replicate": 2},
    {"tp": 2},
    {"cp": 2},
    {"cp": 4},
    {"dp_replicate": 2, "tp": 2},
    {"cp": 2, "tp": 2},
    {"cp": 2, "tp": 2, "dtype": "float64"},
    {"cp": 2, "tp": 2, "dtype": "float64", "gradient_checkpointing": True},
    {"dtype": "float64", "gradient_checkpointing": True},
]
EXPERTS: list[dict[str, Any]] = [
    {"ep": 2},
    {"ep": 4},
    {"ep": 2, "tp": 2},
    {"ep": 2, "cp": 2},
    {"dp_replicate": 2, "ep": 2},
    {"ep": 2, "tp": 2, "dtype": "float64", "gradient_checkpointing": True},
    {"ep": 2, "cp": 2, "dtype": "float64", "gradient_checkpointing": True},
    {"ep": 2, "dtype": "float64"},
    {"routed": True},
    {"ep": 2, "cp": 2, "routed": True},
    {"ep": 2, "tp": 2, "dtype": "float64", "gradient_checkpointing": True, "routed": True},
]


ADAPTERS_TWO, ADAPTERS_FOUR, ADAPTERS_EXPERTS = (
    [mesh | ADAPTER for mesh in meshes if "tp" not in mesh] for meshes in (TWO, FOUR, EXPERTS)
)


@pytest.fixture(scope="session")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe_model(tmp_path_factory.mktemp("moe"))


def assert_same(found: dict[str, Any], expected: dict[str, Any], bound: float) -> None:
    assert found["num_terms"].tolist() == expected["num_terms"].tolist()
    assert found["num_turns"].tolist() == expected["num_turns"].tolist()
    for name in ("losses", "grad_norms", "entropies"):
        torch.testing.assert_close(found[name], expected[name], rtol=bound, atol=bound)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weights in expected["weights"].items():
        difference = float((found["weights"][name] - weights).abs().max())
        assert difference <= bound, (name, difference)


@pytest.mark.parametrize(
    ("architecture", "num_ranks", "meshes"),
    [
        ("dense", 2, [*TWO, {"dtype": "float64"}]),
        pytest.param("dense", 4, FOUR, marks=pytest.mark.distributed),
        pytest.param("moe", 2, [*TWO, {"ep": 2}], marks=pytest.mark.distributed),
        pytest.param("moe", 4, FOUR, marks=pytest.mark.distributed),
        pytest.param("moe", 4, EXPERTS, marks=pytest.mark.distributed),
        pytest.param("dense", 2, ADAPTERS_TWO, marks=pytest.mark.distributed),
        pytest.param("dense", 4, ADAPTERS_FOUR, marks=pytest.mark.distributed),
        pytest.param("moe", 4, ADAPTERS_EXPERTS, marks=pytest.mark.distributed),
    ],
    ids=["dense-2", "dense-4", "moe-2", "moe-4", "experts-4", "lora-2", "lora-4", "lora-moe-4"],
)
def test_every_mesh_equals_one_process(
    architecture: str,
    num_ranks: int,
    meshes: list[dict[str, Any]],
    model_path: Path,
    moe_path: Path,
    tmp_path: Path,
) -> None:
    model = model_path if architecture == "dense" else moe_path
    run_ranks("mesh_run.py", num_ranks, model, tmp_path, json.dumps(meshes))
    kinds = [(mesh.get("dtype", "float32"), mesh.get("routed", False)) for mesh in meshes]
    lora_rank = meshes[0].get("lora_rank", 0)
    expected = {
        (dtype, routed): three_steps(model, Ranks(), dtype, routed=routed, lora_rank=lora_rank)
        for dtype, routed in set(kinds)
    }
    for number, kind in enumerate(kinds):
        found = torch.load(tmp_path / f"{number}.pt")
        assert_same(found, expected[kind], 1e-5 if kind[0] == "float32" else 1e-12)
    if {"cpu_offload": True} in meshes:
        plain, offloaded = (meshes.index(mesh) for mesh in ({}, {"cpu_offload": True}))
        left, right = (torch.load(tmp_path / f"{n}.pt")["weights"] for n in (plain, offloaded))
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert max(expected["float32", False]["grad_norms"]) > TRAINER.max_grad_norm, (
        "clipping is compared"
    )
