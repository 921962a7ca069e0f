"""Compares every mesh of the trainer with one process, over three steps of tiny models.

    python benchmarks/meshes.py

`tests/distributed/test_mesh.py` trains a tiny Qwen3 and a tiny Qwen3-MoE (and adapters on them),
and tiny models with layers of every other kind, on two and four gloo ranks: token trees, shares of
unequal size, and one step in which only the ranks of one share have work. The test bounds the
differences to 1e-5 in float32 and 1e-12 in float64 and reports its measurements; this script runs
it and writes one row per case: the largest difference of losses, gradient norms and parameters from
those of one process.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]


def rows() -> list[dict[str, Any]]:
    """Run the test and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        test = "tests/distributed/test_mesh.py"
        options = ("-m", "distributed or not distributed", "--junit-xml", str(report))
        subprocess.run([sys.executable, "-m", "pytest", "-q", test, *options], cwd=ROOT, check=True)
        properties = ElementTree.parse(report).iter("property")
        return [json.loads(found.attrib["value"]) for found in properties]


def main() -> None:
    """Run all cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/meshes.json")
    arguments = parser.parse_args()
    made = rows()
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
