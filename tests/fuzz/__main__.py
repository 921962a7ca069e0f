"""`python -m fuzz --cases N --seed S --json`: see `scripts/fuzz`.

The targets are the tests marked `fuzz`. They share the cases in the proportion of their marks, in
rounds with seeds of their own, each file of tests in a process of its own: one that dies takes no other
target along.
"""

import argparse
import contextlib
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from fuzz.asked import FACTOR, REPORT

ROUND_CASES = 2_000
"""Cases of the largest target in one process: hypothesis remembers all of them."""
_TESTS = "tests/unit"
_TAIL_LINES = 40
_FAILED = re.compile(r"^FAILED (?P<test>\S+)", re.MULTILINE)


class Targets:
    """A plugin of pytest that notes the collected tests and their marks."""

    def __init__(self) -> None:
        self.in_suite: dict[str, int] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note them."""
        for item in session.items:
            if (mark := item.get_closest_marker("fuzz")) is not None:
                self.in_suite[item.nodeid] = int(mark.args[0])


def targets(only: str) -> dict[str, int]:
    """Return the targets whose names hold a word, each with its cases in the suite."""
    found = Targets()
    with contextlib.redirect_stdout(sys.stderr):
        ended = pytest.main(["-qq", "--collect-only", "-m", "fuzz", _TESTS], plugins=[found])
    if ended != pytest.ExitCode.OK:
        raise SystemExit(f"fuzz: the tests cannot be collected ({ended!r})")
    return {name: number for name, number in found.in_suite.items() if only in name}


@dataclass
class Campaign:
    """What was tried, and what came of it."""

    seed: int
    tried: dict[str, dict[str, Any]] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add one round of a target."""
        known = self.tried.setdefault(row["target"], dict.fromkeys(row.keys() - {"target"}, 0))
        for name in known:
            both = (known[name], row[name])
            known[name] = max(both) if name.startswith("longest") else sum(both)

    @property
    def num_cases(self) -> int:
        """All cases so far."""
        return sum(int(row["num_cases"]) for row in self.tried.values())

    def as_json(self) -> dict[str, Any]:
        """Return the summary."""
        rows = self.tried.values()
        return {
            "seed": self.seed,
            "cases": self.num_cases,
            "deaths": len(self.deaths),
            "answers_500": sum(row["num_500"] for row in rows),
            "longest_stall_ms": max((row["longest_stall_ms"] for row in rows), default=0),
            "longest_case_ms": max((row["longest_case_ms"] for row in rows), default=0),
            "failures": self.failures,
            "died": self.deaths,
            "seconds": round(self.seconds, 1),
            "targets": dict(sorted(self.tried.items())),
        }


def rounds(in_suite: Mapping[str, int], num_cases: int) -> Iterator[tuple[float, list[str]]]:
    """Yield the factor on the suite's cases and the targets of one process after the other."""
    factor = num_cases / sum(in_suite.values())
    by_file: dict[str, list[str]] = defaultdict(list)
    for name in in_suite:
        by_file[name.partition("::")[0]].append(name)
    num_rounds = math.ceil(factor * max(in_suite.values()) / ROUND_CASES)
    for _ in range(num_rounds):
        for names in by_file.values():
            yield factor / num_rounds, names


def try_round(campaign: Campaign, factor: float, names: Sequence[str], seed: int) -> None:
    """Let one process try some targets."""
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl", encoding="utf-8") as report:
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"),
                *("-m", "fuzz", f"--hypothesis-seed={seed}", *names),
            ],
            env={**os.environ, FACTOR: str(factor), REPORT: report.name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        for line in report:
            campaign.add(json.loads(line))
    if ended.returncode not in (0, 1):
        file = names[0].partition("::")[0]
        campaign.deaths.append(f"{file} (seed {seed}) ended with {ended.returncode}")
        sys.stderr.write("\n".join(ended.stdout.splitlines()[-_TAIL_LINES:]) + "\n")
    elif ended.returncode:
        for failed in _FAILED.finditer(ended.stdout):
            campaign.failures.append({"target": failed["test"], "seed": str(seed)})
        sys.stderr.write(ended.stdout)


def main() -> int:
    """Try; the exit status tells whether all held."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description="Try random cases.")
    parser.add_argument("--cases", type=int, default=10_000, help="of all targets together")
    parser.add_argument("--only", default="", help="targets whose names hold this word")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing later")
    parser.add_argument("--seed", type=int, help="of all cases; drawn if absent")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    in_suite = targets(arguments.only)
    if not in_suite:
        parser.error(f"no target's name holds {arguments.only!r}")
    seed = random.randrange(2**31) if arguments.seed is None else arguments.seed
    campaign, began = Campaign(seed), time.monotonic()
    for number, (factor, names) in enumerate(rounds(in_suite, arguments.cases)):
        if time.monotonic() - began > arguments.seconds:
            break
        try_round(campaign, factor, names, seed + number)
        campaign.seconds = time.monotonic() - began
        sys.stderr.write(f"{campaign.num_cases} cases in {campaign.seconds:.0f} s\n")
    found = campaign.as_json()
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        facts = ", ".join(f"{name} {value}" for name, value in found.items() if name != "targets")
        sys.stdout.write(f"{facts}\n")
    return 1 if campaign.deaths or campaign.failures else 0


if __name__ == "__main__":
    sys.exit(main())
