"""Keeps scripts/constraints.txt, the exact versions that AgentRL is developed and tested with.

    .venv/bin/python scripts/lock.py            pin what is installed, new requirements included
    .venv/bin/python scripts/lock.py --check    fail where a pin is missing, unused or not met

Walks from the dependencies of the extra `dev` in pyproject.toml through the metadata of what is
installed in this environment. Versions carry no local part (`2.13.0+cpu` is pinned as `2.13.0`), so
that builds for other devices meet them too.
"""

import argparse
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "scripts/constraints.txt"
HEADER = "# Exact versions that AgentRL is developed and tested with. Written by scripts/lock.py.\n"


def declared(extra: str = "dev") -> Iterator[Requirement]:
    """Yield the requirements in pyproject.toml of an extra, and of those that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield from map(Requirement, project["dependencies"])
    for requirement in map(Requirement, project["optional-dependencies"][extra]):
        if requirement.name == project["name"]:
            for named in requirement.extras:
                yield from declared(named)
        else:
            yield requirement


def installed() -> tuple[dict[str, str], set[str]]:
    """Return name -> version of everything required, and the names that are not installed."""
    versions: dict[str, str] = {}
    missing: set[str] = set()
    seen: set[tuple[str, str]] = set()
    queue = [(requirement, "") for requirement in declared()]
    while queue:
        requirement, extra = queue.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:
            missing.add(requirement.name)
            continue
        versions[found.metadata["Name"]] = Version(found.version).public
        for wanted in ("", *requirement.extras):
            if (requirement.name, wanted) not in seen:
                seen.add((requirement.name, wanted))
                queue += [(Requirement(line), wanted) for line in found.requires or ()]
    return versions, missing


def pinned() -> dict[str, str]:
    """Return name -> version of the file as it is."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    pins = [line.partition("==") for line in lines if line and not line.startswith("#")]
    return {name: version for name, _, version in pins}


def differences(versions: dict[str, str]) -> Iterator[str]:
    """Yield one line for each pin that is missing, unused or not met."""
    wanted = {canonicalize_name(name): version for name, version in versions.items()}
    found = {canonicalize_name(name): version for name, version in pinned().items()}
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            yield f"{name} {wanted[name]} is installed and not pinned"
        elif name not in wanted:
            yield f"{name}=={found[name]} is pinned and not required"
        elif wanted[name] != found[name]:
            yield f"{name} {wanted[name]} is installed, pinned is {found[name]}"


def main() -> int:
    """Write the pins, or compare them with what is installed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    is_check = parser.parse_args().check
    versions, missing = installed()
    if missing:
        print(f"lock: not installed: {', '.join(sorted(missing))}; run scripts/setup first")
        return 1
    if is_check:
        found = list(differences(versions))
        print("".join(f"lock: {line}\n" for line in found), end="", file=sys.stderr)
        return 1 if found else 0
    lines = sorted((f"{name}=={version}" for name, version in versions.items()), key=str.casefold)
    FILE.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
