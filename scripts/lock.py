"""Maintains the exact versions that AgentRL is developed with, and the hashes for its images.

    .venv/bin/python scripts/lock.py            pin what is installed, including new requirements
    .venv/bin/python scripts/lock.py --check    fail if a pin is missing, unused or not met

`scripts/constraints.txt` is computed from the dependencies of the extra `dev` in pyproject.toml and
the metadata of the packages installed in this environment. Versions have no local part
(`2.13.0+cpu` is pinned as `2.13.0`), so builds for other devices satisfy them too.

`scripts/locked/*.txt` name every package of an image, or of a build, with the hashes of its files
on the index. `uv` resolves them under these constraints and must be on the PATH (`pipx install
uv`).
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "scripts/constraints.txt"
HEADER = "# Exact versions that AgentRL is developed and tested with. Written by scripts/lock.py.\n"
LOCKED = ROOT / "scripts/locked"
LOCKED_HEADER = "# Versions and hashes for Linux and Python 3.11. Written by scripts/lock.py.\n"
IMAGE_EXTRAS = {"base": (), "engine,train": ("engine", "train")}
"""Files of `scripts/locked`, and the extras whose dependencies they hold."""
OTHERS = ("build", "uv")
"""Further files there: build requirements of a wheel, and `uvx` for tool servers."""
UV = "uv==0.9.13"
EDITABLES = "editables>=0.5"
"""Additional requirement of hatchling for an editable install."""
_PLATFORM = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28")
_PIN = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>[^ ;]+)", re.MULTILINE)


def pyproject() -> dict[str, Any]:
    """Return the contents of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def declared(extra: str = "") -> Iterator[Requirement]:
    """Yield the requirements in pyproject.toml of an extra, and of those that it names."""
    project = pyproject()["project"]
    yield from map(Requirement, project["dependencies"])
    for requirement in map(Requirement, project["optional-dependencies"].get(extra, ())):
        if requirement.name == project["name"]:
            for named in requirement.extras:
                yield from declared(named)
        else:
            yield requirement


def installed(*extras: str) -> tuple[dict[str, str], set[str]]:
    """Return name -> version of all requirements of extras, and the names that are not installed."""
    versions: dict[str, str] = {}
    missing: set[str] = set()
    seen: set[tuple[str, str]] = set()
    queue = [(requirement, "") for extra in ("", *extras) for requirement in declared(extra)]
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
    """Return name -> version from the current file."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    pins = [line.partition("==") for line in lines if line and not line.startswith("#")]
    return {name: version for name, _, version in pins}


def differences(versions: dict[str, str]) -> Iterator[str]:
    """Yield one line for each pin that is missing, unused or not met."""
    wanted = {canonicalize_name(name): version for name, version in versions.items()}
    found = {canonicalize_name(name): version for name, version in pinned().items()}
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            yield f"{name} {wanted[name]} is installed but not pinned"
        elif name not in wanted:
            yield f"{name}=={found[name]} is pinned but not required"
        elif wanted[name] != found[name]:
            yield f"{name} {wanted[name]} is installed, pinned is {found[name]}"


def locked(name: str) -> dict[NormalizedName, str]:
    """Return name -> version of a file of `scripts/locked`."""
    text = (LOCKED / f"{name}.txt").read_text(encoding="utf-8")
    return {canonicalize_name(pin["name"]): pin["version"] for pin in _PIN.finditer(text)}


def differences_of_locked() -> Iterator[str]:
    """Yield one line for each package that a locked file lacks or has in a different version."""
    known = {canonicalize_name(name): version for name, version in pinned().items()}
    for name, extras in IMAGE_EXTRAS.items():
        pins, (versions, _) = locked(name), installed(*extras)
        for package in sorted(map(canonicalize_name, versions)):
            if package not in pins:
                yield f"scripts/locked/{name}.txt lacks {package}"
    for name in (*IMAGE_EXTRAS, *OTHERS):
        for package, version in locked(name).items():
            if known.get(package, version) != version:
                yield f"scripts/locked/{name}.txt has {package} {version}, pinned is {known[package]}"


def write_locked() -> None:
    """Let uv resolve versions and hashes for every file of `scripts/locked`."""
    LOCKED.mkdir(exist_ok=True)
    for name, extras in IMAGE_EXTRAS.items():
        _compile(name, "pyproject.toml", *(word for extra in extras for word in ("--extra", extra)))
    build = [*pyproject()["build-system"]["requires"], EDITABLES]
    for name, requirements in zip(OTHERS, (build, [UV]), strict=True):
        with tempfile.NamedTemporaryFile("w", suffix=".in", encoding="utf-8") as file:
            file.write("\n".join(requirements))
            file.flush()
            _compile(name, file.name)


def _compile(name: str, *arguments: str) -> None:
    command = ["uv", "pip", "compile", "--quiet", *arguments, *_PLATFORM, "--constraint", str(FILE)]
    command += ["--generate-hashes", "--no-emit-index-url", "--no-annotate", "--no-header"]
    found = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    (LOCKED / f"{name}.txt").write_text(LOCKED_HEADER + found.stdout, encoding="utf-8")


def main() -> int:
    """Write the pins, or compare them with what is installed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    is_check = parser.parse_args().check
    versions, missing = installed("dev")
    if missing:
        print(f"lock: not installed: {', '.join(sorted(missing))}; run scripts/setup first")
        return 1
    if is_check:
        found = [*differences(versions), *differences_of_locked()]
        print("".join(f"lock: {line}\n" for line in found), end="", file=sys.stderr)
        return 1 if found else 0
    if shutil.which("uv") is None:
        print("lock: uv is not on the PATH, but is needed for the hashes; run pipx install uv")
        return 1
    lines = sorted((f"{name}=={version}" for name, version in versions.items()), key=str.casefold)
    FILE.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    write_locked()
    return 0


if __name__ == "__main__":
    sys.exit(main())
