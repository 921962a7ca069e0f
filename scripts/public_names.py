"""Writes docs/api/public_names.txt: all public names with their signatures.

    .venv/bin/python scripts/public_names.py            write the list
    .venv/bin/python scripts/public_names.py --check    fail if the list differs

Public are the names on the pages of docs/api. A line of the list that disappears or changes breaks
code of users; scripts/check therefore compares the list with the sources.
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
_DIRECTIVE = re.compile(r"^::: agentrl\.?(\S*)", re.MULTILINE)
_CONFIGURES_PYDANTIC = "model_config"

Node = griffe.Object | griffe.Alias


def shown(node: Node) -> Iterator[Node]:
    """Yield what a directive of an API page shows: an object, or the names of a module."""
    if not node.is_module:
        yield node
    elif node.exports is not None:
        yield from (node[str(name)] for name in node.exports)
    else:
        named = [one for one in node.members.values() if one.is_public and not one.is_alias]
        own = [one for one in named if one.has_docstring and not one.is_module]
        # A package without names of its own stands for its modules.
        yield from own or (name for one in named if one.is_module for name in shown(one))


def public_names() -> dict[str, Node]:
    """Return the public names by import path."""
    package = griffe.load("agentrl", search_paths=[ROOT / "src"], resolve_aliases=True)
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(LIST.parent.glob("*.md")))
    found = (
        name
        for path in _DIRECTIVE.findall(pages)
        for name in shown(package[path] if path else package)
    )
    return {name.path: name for name in found}


def line(path: str, node: Node) -> str:
    """Return the line of a name or of a class's member."""
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
    """Yield the lines of all names: a name that another path repeats, or the name with its members."""

    def preference(path: str) -> tuple[bool, int, str]:
        module = path.rpartition(".")[0]
        is_at_home = names[path].canonical_path.startswith(f"{module}.")
        return (not is_at_home, path.count("."), path)

    home: dict[str, str] = {}
    for path in sorted(names, key=preference):
        node = names[path]
        first = home.setdefault(node.canonical_path, path)
        if first != path:
            yield f"{path} = {first}"
            continue
        yield line(path, node)
    for path in home.values():
        if names[path].is_class:
            yield from (line(f"{path}.{one.name}", one) for one in members(names[path], home))


def members(cls: Node, listed: dict[str, str]) -> Iterator[Node]:
    """Yield a class's public members, without those inherited from a class that is listed itself."""
    for name, one in cls.all_members.items():
        is_known = one.inherited and one.canonical_path.rpartition(".")[0] in listed
        is_shown = name == "__init__" or not name.startswith("_")
        if is_shown and not is_known and name != _CONFIGURES_PYDANTIC:
            yield one


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
