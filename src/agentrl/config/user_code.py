"""Python code of the user that a flag names: a file, or a module by its dotted name."""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.errors import ConfigError

_LIBRARY_FOLDERS = tuple(
    os.path.join(folder, "")
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]),
    )
)


def load_user_module(source: str | Path, what: str) -> ModuleType:
    """Import a Python file (`path/to/file.py`) or a module (`package.module`), once per process.

    A file may import its neighbors, as if it had been started as a program.
    """
    path = Path(source)
    try:
        if path.suffix != ".py":
            return importlib.import_module(str(source))
        if not path.is_file():
            raise ConfigError(f"{what}: no such file in {path.absolute().parent}")
        return _load_file(path.resolve())
    except ConfigError:
        raise
    except SystemExit as end:
        raise ConfigError(
            f"{what}: importing it exits the program ({end.code}); move the code that runs it as a "
            'program under `if __name__ == "__main__":`'
        ) from end
    except Exception as error:
        raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error


def load_reference(reference: str, what: str) -> Any:
    """Return the object that `path/to/file.py:name` or `package.module:name` names."""
    place, colon, name = reference.rpartition(":")
    if not colon:
        raise ConfigError(f"{what}: {reference!r} does not name an object; write file.py:name")
    found: Any = load_user_module(place, f"{what}: {place}")
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{what}: {place} defines no {name!r}")
        found = getattr(found, part)
    return found


def source_digest(function: Callable[..., Any]) -> str:
    """Return the SHA-256 of the file that defines a user's function."""
    file = inspect.getsourcefile(inspect.unwrap(function))
    assert file is not None, "a function that was loaded by reference has a file"
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def check_agent_function(agent: Callable[..., Any], what: str) -> None:
    """Refuse a function that cannot be called as an agent: with a task and an endpoint."""
    if isinstance(agent, type) or _is_generator(agent):
        kind = "class" if isinstance(agent, type) else "generator"
        raise ConfigError(
            f"{what}: it is a {kind}; an agent must be a function that returns the answer"
        )
    try:
        signature = inspect.signature(agent)
        signature.bind(None, None)
        names = [*signature.parameters]
        is_valid = names[0] != "endpoint" and not any(name.endswith("base_url") for name in names)
    except (TypeError, ValueError):  # ValueError: a function of C has no signature
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"{what}: an agent is called with (task, endpoint); define `async def play(task, "
            "endpoint)`, and read the model's address, name and key from endpoint.base_url, "
            "endpoint.model and endpoint.api_key"
        )


def users_place(stack: traceback.StackSummary) -> str:
    """Return `file:line` of the innermost call in the user's own code, else of the innermost."""
    user_frames = [frame for frame in stack if not frame.filename.startswith(_LIBRARY_FOLDERS)]
    frame = (user_frames or stack)[-1]
    path = Path(frame.filename)
    display_path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{display_path}:{frame.lineno}"


def _is_generator(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _load_file(path: Path) -> ModuleType:
    folder_hash = hashlib.blake2b(str(path.parent).encode(), digest_size=4).hexdigest()
    name = f"agentrl_user_{folder_hash}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
