"""Start a script of `tests/support` on several gloo ranks and wait for its end."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_PATHS = os.pathsep.join(str(REPOSITORY / name) for name in ("src", "tests", "benchmarks"))


def run_ranks(script: str, num_ranks: int, *arguments: object, **environment: str) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc_per_node", str(num_ranks), f"tests/support/{script}"),
        *map(str, arguments),
    ]
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": _PATHS} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        try:
            output, _ = launcher.communicate(timeout=280)
        except BaseException:
            launcher.terminate()  # it ends its ranks, which a kill would leave behind
            raise
    assert launcher.returncode == 0, output[-4000:]
