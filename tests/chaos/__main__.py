"""`python -m chaos --faults N --seed S --json`: see `scripts/chaos`."""

import argparse
import asyncio
import json
import logging
import secrets
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from chaos.harness import RunKind, run_chaos
from chaos.plan import ELECTIONS, EVERYTHING
from chaos.verdict import MUST_BE_ZERO

ELECTION_SHARE = 0.25
"""Of the faults: they strike a second run, on a replica set of three."""


def main() -> int:
    """Run, print, and return 0 when nothing was lost or done twice."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--faults", "--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="of all faults; drawn if absent")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    parser.add_argument("--rollouts", choices=("chains", "tree"), default="chains")
    parser.add_argument(
        "--own_loop", action="store_true", help="train with a loop as users write it"
    )
    parser.add_argument("--keep", type=Path, help="folder for logs, journals and data")
    arguments = parser.parse_args()
    # A shell's background job ignores SIGINT, and its processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("chaos").setLevel(logging.INFO)
    logging.getLogger("chaos").info("seed %d", seed)
    with tempfile.TemporaryDirectory(prefix="agentrl-chaos-") as scratch:
        folder = arguments.keep or Path(scratch)
        kind = RunKind(arguments.rollouts, is_own_loop=arguments.own_loop)
        found = play(folder, arguments.faults, seed, kind)
    failed = [name for name in (*MUST_BE_ZERO, "unexpected_exits") if found[name]]
    if not arguments.json:
        said = ", ".join(failed) or "nothing lost, nothing twice"
        sys.stdout.write(f"{found['faults']} faults (seed {seed}): {said}\n")
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if failed else 0


def play(folder: Path, faults: int, seed: int, kind: RunKind) -> dict[str, Any]:
    """Play a run on one mongod and one on a replica set; return both findings as one."""
    num_elections = round(faults * ELECTION_SHARE)
    found: dict[str, Any] = {}
    for name, number, weights in (
        ("single", faults - num_elections, EVERYTHING),
        ("replicated", num_elections, ELECTIONS),
    ):
        if number:
            (folder / name).mkdir(parents=True)
            outcome = asyncio.run(
                run_chaos(
                    (folder / name).absolute(),
                    faults=number,
                    seed=seed,
                    weights=weights,
                    kind=kind,
                )
            )
            logging.getLogger("chaos").info("%s: %s", name, outcome.as_json())
            found = added(found, outcome.as_json() | {"seed": 0})
    return found | {"seed": seed}


def added(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the sums of figures, and the lists and tables together."""
    total = dict(first)
    for name, value in second.items():
        if isinstance(value, dict):
            total[name] = added(total.get(name, {}), value)
        else:
            total[name] = total[name] + value if name in total else value
    return total


if __name__ == "__main__":
    sys.exit(main())
