"""Python code of the user's that a flag names: a file, or a module by its dotted name."""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from agentrl.errors import ConfigError


def load_user_module(source: str | Path, what: str) -> ModuleType:
    """Import a Python file (`path/to/file.py`) or a module (`package.module`), once a process.

    A file may import its neighbors, as if it had been started as a program.

    Args:
        source: path or dotted name.
        what: name of the code in error messages.

    Raises:
        ConfigError: it does not exist, or its import fails.
    """
    path = Path(source)
    try:
        if path.suffix != ".py":
            return importlib.import_module(str(source))
        if not path.is_file():
            raise ConfigError(f"{what}: no such file")
        return _load_file(path.resolve())
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    place = hashlib.blake2b(str(path.parent).encode(), digest_size=4).hexdigest()
    name = f"agentrl_user_{place}_{path.stem}"
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
