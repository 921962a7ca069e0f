"""The meshes that are held against one process, grouped so that ranks start once for many.

`run_group` starts the ranks (`mesh_run.py`) and computes the same three steps here.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from support.gloo_ranks import run_ranks
from support.mesh_run import MeshCase, three_steps
from support.tiny_vision import vision_model
from support.training import write_model, write_moe_model

from agentrl.distributed import Ranks


def _cases(architecture: str, *sizes: dict[str, Any], **options: Any) -> list[MeshCase]:
    return [MeshCase(architecture, **each, **options) for each in sizes]


_FSDP: dict[str, int] = {}
_HSDP, _TP, _CP, _EP = ({name: 2} for name in ("dp_replicate", "tp", "cp", "ep"))
_PAIRS = (_HSDP, _TP, _CP, _HSDP | _TP, _CP | _TP)
"""Of four ranks; FSDP2 has those that the others leave."""
_EXPERT_PAIRS = (_EP, _EP | _TP, _EP | _CP, _HSDP | _EP)
_EXACT: dict[str, Any] = {"dtype": "float64", "gradient_checkpointing": True}
_ADAPTER = {"lora_rank": 4}

GROUPS: dict[str, tuple[int, list[MeshCase]]] = {
    "two-dense": (
        2,
        [
            *_cases("dense", _FSDP, _HSDP, _TP, _CP),
            *_cases("dense", _FSDP, cpu_offload=True),
            *_cases("dense", _FSDP, _TP, _CP, activation_offloading=True),
            *_cases("dense", _FSDP, dtype="float64"),
        ],
    ),
    "two": (
        2,
        [
            *_cases("moe", _FSDP, _HSDP, _TP, _CP, _EP),
            *_cases("moe", _FSDP, cpu_offload=True),
            *_cases("dense", _FSDP, _HSDP, _TP, _CP, **_ADAPTER),
            *_cases("dense", _FSDP, cpu_offload=True, **_ADAPTER),
            *_cases("moe", _TP, _EP, **_ADAPTER),
        ],
    ),
    "four-dense": (
        4,
        [
            *_cases("dense", _FSDP, *_PAIRS, {"cp": 4}),
            *_cases("dense", _FSDP, _CP | _TP, **_EXACT),
            *_cases("dense", *_PAIRS, **_ADAPTER),
            *_cases("dense", _CP | _TP, **_ADAPTER, **_EXACT),
        ],
    ),
    "four-moe": (
        4,
        [
            *_cases("moe", _FSDP, *_PAIRS, {"cp": 4}),
            *_cases("moe", _FSDP, _CP | _TP, **_EXACT),
        ],
    ),
    "two-vision": (
        2,
        [
            *_cases("qwen3_vl", _FSDP, _HSDP),
            *_cases("qwen3_vl", _FSDP, dtype="float64", gradient_checkpointing=True),
            *_cases("gemma3", _FSDP),
        ],
    ),
    "four-vision": (4, _cases("qwen3_vl", _FSDP, _HSDP)),
    "four-experts": (
        4,
        [
            *_cases("moe", *_EXPERT_PAIRS, {"ep": 4}),
            *_cases("moe", _EP | _TP, _EP | _CP, **_EXACT),
            *_cases("moe", _FSDP, _EP | _CP, routed=True),
            *_cases("moe", _EP | _TP, routed=True, **_EXACT),
            *_cases("moe", *_EXPERT_PAIRS, **_ADAPTER),
        ],
    ),
}


_MODELS = {"moe": "Qwen3-MoE", "dense": "Qwen3"}


def write_models(folder: Path) -> Path:
    """Write what the cases' `architecture` names, and return the folder."""
    write_model(folder / "dense")
    write_moe_model(folder / "moe")
    for family in ("qwen3_vl", "gemma3"):
        vision_model(family, torch.float32).save_pretrained(folder / family)
    return folder


@dataclass(frozen=True)
class Outcome:
    """What ranks and one process made of a case; see `mesh_run.three_steps`."""

    case: MeshCase
    num_ranks: int
    found: dict[str, Any]
    expected: dict[str, Any]

    def largest_differences(self) -> dict[str, float]:
        """Return how far losses, gradient norms and parameters are apart at most."""
        found, expected = self.found["weights"], self.expected["weights"]
        assert found.keys() == expected.keys()
        return {
            "loss": _apart(self.found["losses"], self.expected["losses"]),
            "grad_norm": _apart(self.found["grad_norms"], self.expected["grad_norms"]),
            "parameters": max(_apart(found[name], expected[name]) for name in expected),
        }

    def row(self) -> dict[str, Any]:
        """Return what the case was and what it showed."""
        case = self.case
        options = ("gradient_checkpointing", "cpu_offload", "activation_offloading", "routed")
        found: dict[str, Any] = {
            "model": _MODELS.get(case.architecture, case.architecture),
            "ranks": self.num_ranks,
            "mesh": case.mesh_name(self.num_ranks),
            "dtype": case.dtype,
        }
        if case.lora_rank:
            found["lora_rank"] = case.lora_rank
        found |= {name: True for name in options if getattr(case, name)}
        return found | {
            name: float(f"{value:.1e}") for name, value in self.largest_differences().items()
        }


def run_group(name: str, models: Path, output: Path) -> Iterator[Outcome]:
    """Run a group on its ranks, and each of its cases in this process."""
    num_ranks, cases = GROUPS[name]
    described = json.dumps([asdict(case) for case in cases])
    run_ranks("mesh_run.py", num_ranks, models, output, described)
    alone: dict[MeshCase, dict[str, Any]] = {}
    for number, case in enumerate(cases):
        if case.alone not in alone:
            alone[case.alone] = three_steps(models, Ranks(), case.alone)
        found = torch.load(output / f"{number}.pt")
        yield Outcome(case, num_ranks, found, alone[case.alone])


def _apart(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())
