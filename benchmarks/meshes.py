"""Compares every mesh of the trainer with one process, over three steps of tiny models.

    python benchmarks/meshes.py

`tests/distributed/test_mesh.py` trains a tiny Qwen3 and a tiny Qwen3-MoE (and adapters on them),
and tiny models with layers of every other kind, on two and four gloo ranks: token trees, shares of
unequal size, and one step in which only the ranks of one share have work. The test bounds the
differences to 1e-5 in float32 and 1e-12 in float64 and reports its measurements; this script runs
it and writes one row per case: the largest difference of losses, gradient norms and parameters from
those of one process.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from harness.processes import ROOT
from harness.results import parser, report


def rows() -> list[dict[str, Any]]:
    """Run the test and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "report.xml"
        test = "tests/distributed/test_mesh.py"
        options = ("-m", "distributed or not distributed", "--junit-xml", str(found))
        subprocess.run([sys.executable, "-m", "pytest", "-q", test, *options], cwd=ROOT, check=True)
        return [
            json.loads(one.attrib["value"]) for one in ElementTree.parse(found).iter("property")
        ]


def table() -> dict[str, Any]:
    """Return all cases, and the largest difference in each precision."""
    made = rows()
    names = ("loss", "grad_norm", "parameters")
    largest: dict[str, float] = {}
    for row in made:
        largest[row["dtype"]] = max(largest.get(row["dtype"], 0.0), *(row[name] for name in names))
    return {"largest_difference": largest, "cases": made}


if __name__ == "__main__":
    report(parser(__doc__, "meshes"), lambda _: table())
