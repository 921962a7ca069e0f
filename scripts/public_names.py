"""Writes docs/api/public_names.txt: all public names with their signatures.

    .venv/bin/python scripts/public_names.py            write the list
    .venv/bin/python scripts/public_names.py --check    fail if the list differs

Public are the objects on the pages of docs/api and the members that they name. A line of the list
that disappears or changes breaks code of users; scripts/check therefore compares the list with the
sources.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "docs/api/public_names.txt"
_DIRECTIVE = re.compile(
    r"^::: agentrl\.(\S+)(?:\n    options:\n      members: \[([^\]]*)\])?", re.MULTILINE
)

Node = griffe.Object | griffe.Alias


def public_names() -> dict[str, Node]:
    """Return the public names by import path: objects, and the members that a page names."""
    package = griffe.load("agentrl", search_paths=[ROOT / "src"], resolve_aliases=True)
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(LIST.parent.glob("*.md")))
    names: dict[str, Node] = {}
    for path, members in _DIRECTIVE.findall(pages):
        names[f"agentrl.{path}"] = shown = package[path]
        for member in filter(None, map(str.strip, members.split(","))):
            names[f"agentrl.{path}.{member}"] = shown.all_members[member]
    return names


def line(path: str, node: Node) -> str:
    """Return the line of a name."""
    # The signature of an alias lacks the type of the result.
    node = node.final_target if isinstance(node, griffe.Alias) else node
    if isinstance(node, griffe.Class):
        return f"{path}: class({', '.join(map(str, node.bases))})"
    if isinstance(node, griffe.Function):
        kinds = [kind for kind in ("async", "classmethod", "staticmethod") if kind in node.labels]
        signature = node.signature().removeprefix(node.name)
        return f"{path}{signature}{''.join(f' [{kind}]' for kind in kinds)}"
    assert isinstance(node, griffe.Attribute), path
    annotation = "" if node.annotation is None else f": {node.annotation}"
    # A value that `__init__` computes is no part of the interface.
    is_default = "class-attribute" in node.labels or isinstance(node.parent, griffe.Module)
    return f"{path}{annotation}{f' = {node.value}' if node.value and is_default else ''}"


def lines(names: dict[str, Node]) -> Iterator[str]:
    """Yield the lines of all names."""
    return (line(path, node) for path, node in names.items())


def main() -> int:
    """Write or check the list."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    before = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    now = sorted(lines(public_names()))
    if not is_check:
        LIST.write_text("".join(f"{text}\n" for text in now), encoding="utf-8")
    elif before != now:
        changes = difflib.unified_diff(before, now, "public names", "sources", n=0, lineterm="")
        print(*changes, sep="\n")
        print("Public names changed (- breaks code of users): run scripts/public_names.py")
    return int(is_check and before != now)


if __name__ == "__main__":
    sys.exit(main())
