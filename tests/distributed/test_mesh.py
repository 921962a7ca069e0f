"""Every mesh of gloo ranks computes what one process computes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.mesh_run import TRAINER, MeshCase
from support.meshes import GROUPS, Outcome, run_group


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def assert_same(outcome: Outcome) -> None:
    found, expected, bound = outcome.found, outcome.expected, outcome.case.bound
    for name in ("num_targets", "num_turns"):
        assert found[name].tolist() == expected[name].tolist()
    torch.testing.assert_close(found["entropies"], expected["entropies"], rtol=bound, atol=bound)
    differences = outcome.largest_differences()
    assert max(differences.values()) <= bound, (outcome.case, differences)
    assert max(expected["grad_norms"]) > TRAINER.max_grad_norm, "clipping is compared"


@pytest.mark.parametrize(
    "group",
    [
        name if name == "two-dense" else pytest.param(name, marks=pytest.mark.distributed)
        for name in GROUPS
    ],
)
def test_every_mesh_equals_one_process(group: str, models: Path, tmp_path: Path) -> None:
    weights: dict[MeshCase, dict[str, torch.Tensor]] = {}
    for outcome in run_group(group, models, tmp_path):
        assert_same(outcome)
        weights[outcome.case] = outcome.found["weights"]
    for case in [case for case in weights if case.cpu_offload]:
        plain = weights[replace(case, cpu_offload=False)]
        assert all(torch.equal(plain[name], values) for name, values in weights[case].items())
