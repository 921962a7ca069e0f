"""Writes the figures of benchmarks/results into the README and the pages of docs.

    .venv/bin/python scripts/performance_page.py            write the figures
    .venv/bin/python scripts/performance_page.py --check    fail if a page differs

A page names the place of a figure in a comment before it, and the figure keeps its form:
`<!--store.claims_ratio-->0.94` is `claims_ratio` of store.json with two decimals.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = ("README.md", "docs/performance.md", "docs/security.md", "docs/training.md")
_FIGURE = re.compile(
    r"<!--(?P<file>\w+)\.(?P<key>\S+?)-->(?P<number>[\d,]+(?:\.(?P<decimals>\d+))?%?)"
)


def filled(page: str) -> str:
    """Return the text of a page with the figures of the results."""
    return _FIGURE.sub(_figure, page)


def _figure(found: re.Match[str]) -> str:
    value: Any = json.loads((RESULTS / f"{found['file']}.json").read_text(encoding="utf-8"))
    for name in found["key"].split("."):
        value = value[int(name) if isinstance(value, list) else name]
    form = f",.{len(found['decimals'] or '')}" + ("%" if found["number"].endswith("%") else "f")
    return f"<!--{found['file']}.{found['key']}-->{value:{form}}"


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true")
    is_check, is_wrong = parser.parse_args().check, False
    for path in (ROOT / name for name in PAGES):
        text = path.read_text(encoding="utf-8")
        if text == filled(text):
            continue
        is_wrong = True
        if is_check:
            print(f"{path} differs from the results: run scripts/performance_page.py")
        else:
            path.write_text(filled(text), encoding="utf-8")
    return int(is_check and is_wrong)


if __name__ == "__main__":
    sys.exit(main())
