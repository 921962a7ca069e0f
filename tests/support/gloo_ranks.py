"""Start a script of `tests/support` on several gloo ranks and wait for its end."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_PATHS = os.pathsep.join(str(REPOSITORY / name) for name in ("src", "tests", "benchmarks"))


def run_ranks(script: str, num_ranks: int, *arguments: object, **environment: str) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", str(num_ranks), f"tests/support/{script}"),
            *map(str, arguments),
        ],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": _PATHS} | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
