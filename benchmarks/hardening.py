"""Measures the effects of attacks and faults: the figures of the lines of `hardening_lines.py`.

    python benchmarks/hardening.py --out benchmarks/results/hardening.json
    python benchmarks/hardening.py --only engine run                 measure these parts again
    python benchmarks/hardening.py --fuzz fuzz.json --chaos a.json b.json

All attacks are made on the product's own code and processes: a served engine, an agent's endpoint in
front of a store, tool servers that flood their client, private mongods that are killed and whose clock
steps, and a run whose processes are killed one after another. Memory is the growth of a process, and a
stall the processor time of one callback of an event loop. `--fuzz` and `--chaos` take the output of
`scripts/fuzz --json` and `scripts/chaos --json`, and measure nothing; figures of several chaos
campaigns are added. The file keeps figures that a call does not measure. Growth is read from
`growth.json` when `scripts/performance_page.py` writes the table of docs/hardening.md.

Clock steps need libfaketime; attacks by the user `nobody` need root.
"""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hardening_engine
import hardening_run
import hardening_texts
import hardening_tools
from hardening_lines import GROUPS, MEASURED_BEFORE
from harness.machine import machine
from harness.mongod_programs import FAKETIME

FUZZ = ("seed", "cases", "deaths", "answers_500", "longest_stall_ms", "longest_case_ms", "seconds")
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "texts": hardening_texts.readers,
    "files": hardening_texts.question_files,
    "addresses": hardening_texts.image_addresses,
    "secrets": hardening_texts.planted_secrets,
    "tools": hardening_tools.floods,
    "engine": hardening_engine.engine,
    "endpoint": hardening_engine.endpoint,
    "mongod": hardening_run.killed_mongod,
    **({"stranger": hardening_run.stranger} if os.geteuid() == 0 else {}),
    **({"clock": hardening_run.clock_steps} if FAKETIME.exists() else {}),
    "run": hardening_run.run,
}


def fuzzed(path: Path) -> dict[str, Any]:
    """Return the figures of a campaign of `scripts/fuzz`."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return {name: found[name] for name in FUZZ} | {"failures": len(found["failures"])}


def chaos(paths: list[Path]) -> dict[str, Any]:
    """Return the figures of campaigns of `scripts/chaos`, added up."""
    campaigns = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    numbers = {
        name: sum(one[name] for one in campaigns)
        for name, value in campaigns[0].items()
        if name != "seed" and isinstance(value, int | float)
    }
    return {"seeds": [one["seed"] for one in campaigns], **numbers}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/hardening.json"))
    parser.add_argument("--only", nargs="*", choices=PARTS, help="measure these parts, or none")
    parser.add_argument("--fuzz", type=Path, help="what scripts/fuzz --json printed")
    parser.add_argument("--chaos", type=Path, nargs="+", help="what scripts/chaos --json printed")
    arguments = parser.parse_args()
    out: Path = arguments.out
    result = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"parts": {}}
    result["measured_before"] = MEASURED_BEFORE
    result["lines"] = [
        {"group": group, **asdict(line)} for group, of_it in GROUPS.items() for line in of_it
    ]
    if arguments.fuzz is not None:
        result["parts"]["fuzz"] = fuzzed(arguments.fuzz)
    if arguments.chaos is not None:
        result["parts"]["chaos"] = chaos(arguments.chaos)
    write(out, result)
    if arguments.fuzz is not None or arguments.chaos is not None:
        return
    for name in PARTS if arguments.only is None else arguments.only:
        about = machine()
        found = PARTS[name]()
        print(name, json.dumps(found), flush=True)
        result["parts"][name] = {**found, "machine": about}
        write(out, result)


def write(out: Path, result: dict[str, Any]) -> None:
    """Write the result."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
