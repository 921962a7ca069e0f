"""`python -m chaos --kills N --seed S --json`: see `scripts/chaos`."""

import argparse
import asyncio
import logging
import secrets
import sys
import tempfile
from pathlib import Path

from chaos.harness import run_chaos
from chaos.verdict import MUST_BE_ZERO


def main() -> int:
    """Run, print, and return 0 when nothing was lost or done twice."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--seed", type=int, default=None, help="of kills and pauses; drawn if absent"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    parser.add_argument("--keep", type=Path, help="folder for logs, journals and data")
    arguments = parser.parse_args()
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("chaos").setLevel(logging.INFO)
    logging.getLogger("chaos").info("seed %d", seed)
    with tempfile.TemporaryDirectory(prefix="agentrl-chaos-") as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        outcome = asyncio.run(run_chaos(folder.absolute(), kills=arguments.kills, seed=seed))
    failed = [name for name in MUST_BE_ZERO if getattr(outcome.verdict, name)]
    if not arguments.json:
        found = ", ".join(failed) or "nothing lost, nothing twice"
        sys.stdout.write(f"{outcome.kills} kills (seed {seed}): {found}\n")
    sys.stdout.write(outcome.as_json() + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
