"""The command line of programs that write a page of the documentation from the code."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def write_or_check(
    page: Path, pieces: Iterable[str], *, description: str | None, source: str
) -> int:
    """Write a page, or with `--check` say that it differs; return the exit status.

    Args:
        page: the file.
        pieces: its text.
        description: the program's docstring; the first line is its help.
        source: what the page is written from, for the message.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    text = "".join(pieces)
    is_current = page.exists() and page.read_text(encoding="utf-8") == text
    if is_check and not is_current:
        program = Path(sys.argv[0]).name
        print(f"{page.relative_to(ROOT)} differs from the {source}: run scripts/{program}")
    elif not is_current:
        page.write_text(text, encoding="utf-8")
    return int(is_check and not is_current)
