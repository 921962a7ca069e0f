"""`agentrl diff` on a run of the demo: seconds and tokens for about 10,000 decisions.

    python benchmarks/diff.py

The demo runs with its default flags; then version 0 is compared with the last one, on the records that
version 0 or those nearest to it sampled. `seconds` is the wall time of the whole comparison, without
imports and the start of the database: reading, merging, and the passes of both models on all cores.
`share` is the tokens of a model's passes, those that stand for calls included, over the tokens of
separate turns.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.processes import ROOT
from harness.results import parser, report

from agentrl.plugins.inspector.diff_run import diff_policies
from agentrl.store.private_mongod import EmbeddedMongo


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one comparison."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["run", "--run_name", "diff", "--config", str(ROOT / "assets/demo/grpo.yaml")]
        places = {"output_dir": folder / "out", "mongo_data_dir": folder / "mongo"}
        for flag, value in {**places, "logs_dir": folder, "max_steps": given.steps}.items():
            words += [f"--{flag}", str(value)]
        subprocess.run([sys.executable, "-m", "agentrl", *words], cwd=ROOT, check=True)
        with EmbeddedMongo(folder / "mongo") as mongo:
            load, started = os.getloadavg()[0], time.monotonic()
            found = diff_policies(
                *(str(folder / "out"), 0, given.steps),
                limit=given.records,
                db_connection_string=mongo.uri("diff"),
            )
            seconds = time.monotonic() - started
    return {
        "load_at_start": load,
        "decisions": found.whole.num_decisions,
        "records": found.num_records,
        "places": found.num_places,
        "seconds": round(seconds, 1),
        "decisions_per_second": round(found.whole.num_decisions / seconds),
        "tokens_computed": found.tokens_computed,
        "tokens_separate": found.tokens_separate,
        "share": round(found.tokens_computed / found.tokens_separate, 4),
        "flips": found.whole.flips,
        "kl": found.whole.kl,
        "changes": dict(found.whole.changes),
    }


if __name__ == "__main__":
    flags = parser(__doc__, "diff")
    flags.add_argument("--steps", type=int, default=50)
    flags.add_argument("--records", type=int, default=3400, help="about three decisions each")
    report(flags, measured)
