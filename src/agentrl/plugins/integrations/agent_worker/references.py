"""Python objects by reference: `file.py:name`, `package.module:name`, and `file.pkl:name`.

Other processes must find the objects that the user passed, so they receive the place of the
definition. An object defined in a notebook or an interactive interpreter has no file; it is pickled
with its dependencies.
"""

import ast
import importlib
import importlib.util
import inspect
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from agentrl.config.private_files import write_private
from agentrl.config.user_code import load_reference
from agentrl.errors import ConfigError

_PICKLED = ".pkl"


def load_object(reference: str, argument: str) -> Any:
    """Return the object that `file.py:name`, `package.module:name` or `file.pkl:name` names.

    The folder of a Python file is added to `sys.path`, so that the file can import its neighbors.
    """
    place = reference.rpartition(":")[0]
    if place.endswith(_PICKLED):
        return _unpickle(Path(place), argument)
    return load_reference(reference, argument)


def functions_of(path: Path, argument: str) -> list[str]:
    """Return the names of a Python file's public top-level functions, without running the file."""
    return [
        node.name
        for node in _parse(path, argument).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:1] != "_"
    ]


def reference_to(value: Any, argument: str, folder: Path | None = None) -> str:
    """Return the reference by which another process finds a function or class."""
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if folder is not None and _is_interactive(value.__module__):
        path = folder.absolute() / f"{argument}{_PICKLED}"
        write_private(path, _pickle(value, argument))
        return f"{path}:{name}"
    if not _is_named_definition(value):
        raise ConfigError(
            f"{argument}: {_kind(value)} has no importable name, which other processes need; "
            "define a function (def) at module level in a file"
        )
    if "<locals>" in name:
        raise ConfigError(
            f"{argument}: {name} is defined inside a function; move it to module level in a file"
        )
    module = sys.modules.get(value.__module__)
    file = getattr(module, "__file__", None)
    if value.__module__ != "__main__" and getattr(module, "__spec__", None) is not None:
        package_spec = importlib.util.find_spec(value.__module__.partition(".")[0])
        if package_spec is not None and not _is_next_to_script(file):
            return f"{value.__module__}:{name}"
    if file is None:
        raise ConfigError(f"{argument}: {name} is not defined in a file; move it to one")
    path = Path(file).resolve()
    if value.__module__ == "__main__" and not _has_main_guard(path, argument):
        raise ConfigError(
            f"{argument}: {name} is defined in the training script, which other processes "
            f'import: move the code that runs {path.name} under if __name__ == "__main__":'
        )
    return f"{path}:{name}"


def _is_named_definition(value: Any) -> bool:
    """Return whether a callable's name refers to it: functions and classes, but not methods."""
    if inspect.ismethod(value) and not isinstance(value.__self__, type):
        return False
    is_defined = inspect.isroutine(value) or isinstance(value, type)
    return is_defined and value.__name__ != "<lambda>"


def described(value: Any) -> str:
    """Return what a value is that an argument does not accept, as the subject of a sentence."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a value of type {type(value).__name__}"


def _kind(value: Any) -> str:
    if getattr(value, "__name__", "") == "<lambda>":
        return "a lambda"
    if inspect.ismethod(value):
        return f"the method of an object ({value.__qualname__})"
    return f"an object ({type(value).__name__})"


def is_python_reference(text: str) -> bool:
    """Return whether a path names a Python file, with or without `:name`."""
    return text.endswith(".py") or text.rpartition(":")[0].endswith(".py")


def resolve_reference(text: str, argument: str) -> str:
    """Return a user's `file.py:name` with an absolute path that exists."""
    place, _, name = text.rpartition(":")
    path = Path(place).expanduser().absolute()
    if not place.endswith(".py") and not path.is_file():
        raise ConfigError(f"{argument}: {text}: expected file.py:name")
    if not path.is_file():
        raise ConfigError(f"{argument}: {place}: no such file in {path.parent}")
    return f"{path}:{name}"


def _is_interactive(module: str) -> bool:
    """Return whether a module is a notebook or an interactive session."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return module == "__main__" and (file is None or not Path(file).is_file())


def _pickle(value: Any, argument: str) -> bytes:
    """Return the pickle of an object with all its dependencies in the notebook that defines it."""
    try:
        content: bytes = importlib.import_module("cloudpickle").dumps(value)
    except ModuleNotFoundError:
        raise ConfigError(
            f"{argument}: it is defined in a notebook; move it to a file, or run {sys.executable} "
            "-m pip install cloudpickle"
        ) from None
    except (TypeError, pickle.PicklingError) as error:
        raise ConfigError(
            f"{argument}: objects of the notebook that it uses cannot be pickled ({error}); create "
            "clients and open files inside the function"
        ) from None
    return content


def _unpickle(path: Path, argument: str) -> Any:
    """Return an object that `_pickle` of the same interpreter wrote into a folder of the run."""
    try:
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError("it is writable by others, and loading it executes code")
        return pickle.loads(path.read_bytes())
    except Exception as error:
        raise ConfigError(f"{argument}: {path}: {type(error).__name__}: {error}") from error


def _is_next_to_script(file: str | None) -> bool:
    """Return whether a module was found only because it is in the script's folder.

    Such a module is referenced by its file, because other processes have a different `sys.path`.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return bool(file and script and Path(file).resolve().parent == Path(script).resolve().parent)


def _parse(path: Path, argument: str) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{argument}: {path}: {error.strerror}") from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{argument}: {path} is not valid Python: {error}") from None


def _has_main_guard(path: Path, argument: str) -> bool:
    guards = (node.test for node in _parse(path, argument).body if isinstance(node, ast.If))
    return any("__name__" in ast.unparse(test) for test in guards)


def required_parameters(function: Any) -> tuple[list[str], bool]:
    """Return the names of required positional parameters, and whether any number is accepted."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    return names, any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
