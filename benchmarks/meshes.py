"""How far every mesh of the trainer is from one process, over three steps of tiny models.

    python benchmarks/meshes.py

Two and four gloo ranks train a tiny Qwen3 and a tiny Qwen3-MoE (and adapters on them) on token
trees, with shares of unequal size and one step in which all ranks but those of one share have
nothing to do. A row says how far losses, gradient norms and parameters (the adapter's among them)
are from those of one process, at most. `tests/distributed/test_mesh.py` runs the same cases and
holds them to 1e-5 in float32 and 1e-12 in float64.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.meshes import GROUPS, Outcome, run_group, write_models

ROOT = Path(__file__).parents[1]


def rows() -> Iterator[dict[str, Any]]:
    """Yield a row a case."""
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(Path(folder))
        for group in GROUPS:
            with tempfile.TemporaryDirectory() as output:
                for outcome in run_group(group, models, Path(output)):
                    yield describe(outcome)


def describe(outcome: Outcome) -> dict[str, Any]:
    """Return what a case was and what it showed."""
    case = outcome.case
    options = ("gradient_checkpointing", "cpu_offload", "routed")
    found: dict[str, Any] = {
        "model": "Qwen3-MoE" if case.architecture == "moe" else "Qwen3",
        "ranks": outcome.num_ranks,
        "mesh": case.mesh_name(outcome.num_ranks),
        "dtype": case.dtype,
    }
    if case.lora_rank:
        found["lora_rank"] = case.lora_rank
    found |= {name: True for name in options if getattr(case, name)}
    return found | {
        name: float(f"{value:.1e}") for name, value in outcome.largest_differences().items()
    }


def main() -> None:
    """Run all cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/meshes.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made = []
    for row in rows():
        print(json.dumps(row), flush=True)
        made.append(row)
    largest = {
        dtype: max(
            row[name]
            for row in made
            for name in ("loss", "grad_norm", "parameters")
            if row["dtype"] == dtype
        )
        for dtype in ("float32", "float64")
    }
    result = {
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "largest_difference": largest,
        "cases": made,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
