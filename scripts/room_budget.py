"""Keeps the rooms of the package within their budgets of lines and modules, `scripts/room_budgets.json`.

    .venv/bin/python scripts/room_budget.py             tighten the budgets to what is there
    .venv/bin/python scripts/room_budget.py --check     fail if a room exceeds its budget

A room is a package or module directly under `src/agentrl`, or under its `plugins`. A budget is raised by
hand, in the commit of the decision record that names who needs it (CONTRIBUTING.md).
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = ROOT / "scripts/room_budgets.json"
Figures = dict[str, dict[str, int]]


def measured(package: Path) -> Figures:
    """Return the lines and modules of each room."""
    found: Figures = {}
    for path in sorted(package.rglob("*.py")):
        first, *rest = path.relative_to(package).parts
        room = f"plugins/{rest[0]}" if first == "plugins" and len(rest) > 1 else first
        figures = found.setdefault(room.removesuffix(".py"), {"lines": 0, "modules": 0})
        figures["lines"] += path.read_text(encoding="utf-8").count("\n")
        figures["modules"] += 1
    return found


def excesses(found: Figures, budgets: Figures) -> list[str]:
    """Return a line for each room that exceeds its budget, or has none."""
    return [
        f"{room}: {number} {what}, budget {budgets.get(room, {}).get(what, 0)}"
        for room, figures in found.items()
        for what, number in figures.items()
        if number > budgets.get(room, {}).get(what, 0)
    ]


def main() -> int:
    """Check or tighten the budgets, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    found = measured(ROOT / "src/agentrl")
    budgets: Figures = json.loads(BUDGETS.read_text(encoding="utf-8"))
    problems = excesses(found, budgets)
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    if problems:
        sys.stderr.write("make the room smaller, or see CONTRIBUTING.md on budgets\n")
    elif not check:
        BUDGETS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
