"""The meshes that are held against one process, grouped so that ranks start once for many.

`run_group` starts the ranks (`mesh_run.py`) and computes the same three steps here.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness.tiny_families import tiny_model
from harness.tiny_vision import vision_model
from support.gloo_ranks import run_ranks
from support.mesh_run import MeshCase, three_steps
from support.training import write_model, write_moe_model

from agentrl.distributed import Ranks


def _cases(architecture: str, *sizes: dict[str, Any], **options: Any) -> list[MeshCase]:
    return [MeshCase(architecture, **each, **options) for each in sizes]


_FSDP: dict[str, int] = {}
_HSDP, _TP, _CP, _EP, _PP = ({name: 2} for name in ("dp_replicate", "tp", "cp", "ep", "pp"))
_PAIRS = (_HSDP, _TP, _CP, _HSDP | _TP, _CP | _TP)
"""Of four ranks; FSDP2 has those that the others leave."""
_EXPERT_PAIRS = (_EP, _EP | _TP, _EP | _CP, _HSDP | _EP)
_EXACT: dict[str, Any] = {"dtype": "float64", "gradient_checkpointing": True}
_ADAPTER = {"lora_rank": 4}
KINDS = (
    "qwen3_5_text",
    "qwen3_next",
    "nemotron_h",
    "lfm2",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v3",
)
"""Families with layers of each kind: scans, a convolution, windows, sinks, latent attention, experts."""


def _kinds(*sizes: dict[str, Any], families: Sequence[str] = KINDS) -> list[MeshCase]:
    return [case for family in families for case in _cases(family, *sizes, **_EXACT)]


GROUPS: dict[str, tuple[int, list[MeshCase]]] = {
    "two-dense": (
        2,
        [
            *_cases("dense", _FSDP, _HSDP, _TP, _CP),
            *_cases("dense", _FSDP, cpu_offload=True),
            *_cases("dense", _FSDP, activation_offloading=True),
        ],
    ),
    "two": (
        2,
        [
            *_cases("dense", _TP, _CP, activation_offloading=True),
            *_cases("dense", _FSDP, dtype="float64"),
            *_cases("moe", _FSDP, _HSDP, _TP, _CP, _EP),
            *_cases("moe", _FSDP, cpu_offload=True),
            *_cases("dense", _FSDP, _HSDP, _TP, _CP, **_ADAPTER),
            *_cases("dense", _FSDP, cpu_offload=True, **_ADAPTER),
            *_cases("moe", _TP, _EP, **_ADAPTER),
        ],
    ),
    "two-compiled": (
        2,
        [
            *_cases("dense", _FSDP, _CP, _PP, torch_compile=True),
            *_cases("moe", _FSDP, _EP, gradient_checkpointing=True, torch_compile=True),
            *_cases("dense", _FSDP, torch_compile=True, **_ADAPTER),
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
            *_cases("qwen3_vl", _CP, **_EXACT),
            *_cases("gemma3", _CP),
        ],
    ),
    "two-kinds": (2, _kinds(_FSDP, _TP, _CP)),
    "two-kinds-experts": (2, _kinds(_EP, families=("qwen3_next", "deepseek_v3"))),
    "four-kinds": (4, _kinds(_CP | _TP)),
    "two-stages": (
        2,
        [
            *_cases("dense", _PP, **_EXACT),
            *_cases("dense", _PP, dtype="float64", activation_offloading=True),
            *_cases("dense", _PP),
            *_cases("dense", _PP, dtype="float64", **_ADAPTER),
            *_cases("moe", _PP, **_EXACT),
            *_cases("moe", _PP, dtype="float64", routed=True),
            *_kinds(_PP),
        ],
    ),
    "four-stages": (
        4,
        [
            *_cases("dense", *(_PP | other for other in (_FSDP, _HSDP, _TP, _CP)), **_EXACT),
            *_cases("dense", _PP | _TP, dtype="float64", **_ADAPTER),
            *_cases("moe", *(_PP | other for other in (_FSDP, _EP, _TP)), **_EXACT),
            *_kinds(_PP | _CP, families=("qwen3_5_text", "gemma3_text")),
        ],
    ),
    "four-vision": (4, _cases("qwen3_vl", _FSDP, _HSDP, _CP)),
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


def _write(architecture: str, folder: Path) -> None:
    """Write the model that a case's `architecture` names."""
    if architecture == "dense":
        write_model(folder)
    elif architecture == "moe":
        write_moe_model(folder)
    elif architecture in KINDS:
        tiny_model(architecture).save_pretrained(folder)
    else:
        vision_model(architecture).save_pretrained(folder)


@dataclass(frozen=True)
class Outcome:
    """What ranks and one process made of a case; see `mesh_run.three_steps`."""

    case: MeshCase
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


def run_group(name: str, models: Path, output: Path) -> Iterator[Outcome]:
    """Run a group on its ranks, and each of its cases in this process.

    Args:
        name: of the group.
        models: folder to which missing models are written.
        output: empty folder.
    """
    num_ranks, cases = GROUPS[name]
    for architecture in {case.architecture for case in cases}:
        if not (models / architecture).exists():
            _write(architecture, models / architecture)
    described = json.dumps([asdict(case) for case in cases])
    run_ranks("mesh_run.py", num_ranks, models, output, described)
    alone: dict[MeshCase, dict[str, Any]] = {}
    for number, case in enumerate(cases):
        if case.alone not in alone:
            alone[case.alone] = three_steps(models, Ranks(), case.alone)
        found = torch.load(output / f"{number}.pt")
        yield Outcome(case, found, alone[case.alone])


def _apart(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())
