"""The file of a benchmark's figures, with the conditions under which they were measured."""

import argparse
import json
import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
_PACKAGES = ("pymongo", "torch", "transformers")


def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser of a benchmark's flags, with `--out`."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="file of figures")
    return made


def machine() -> dict[str, Any]:
    """Return the conditions of a measurement that is about to begin."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
    }


def stored(out: Path) -> dict[str, Any]:
    """Return the figures of a file, none if there is no file."""
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    return found


def write(out: Path, found: dict[str, Any]) -> None:
    """Print figures, and write them to a file."""
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    print(text, flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")


def keep(out: Path, found: dict[str, Any]) -> None:
    """Add figures to a file, which keeps those of other parts."""
    write(out, {**stored(out), **found})


def report(
    flags: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], dict[str, Any]]
) -> None:
    """Measure everything, and write the figures with their conditions."""
    given = flags.parse_args()
    about = machine()
    write(given.out, {**measure(given), "machine": about})


def setting(text: str) -> tuple[str, Any]:
    """Return the name and the value of a setting `name=value`."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
