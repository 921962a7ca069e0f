"""Files that ship with the package: the demo, the example tool server, the FSDP configuration.

Input: the path of such a file in the repository, as `assets/demo/model`. Output: where it is on
this machine. A wheel carries these files in `agentrl/_data`; a checkout (an editable install) has
them at the top of the repository. Nothing here reads the files.
"""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_ROOTS = (_PACKAGE / "_data", _PACKAGE.parents[1])


def shipped_file(name: str) -> Path:
    """Return the absolute path of a file or directory that ships with the package.

    Args:
        name: its path in the repository, below `assets/` or `examples/`.

    Raises:
        FileNotFoundError: the package ships no such file.
    """
    found = _find(Path(name))
    if found is None:
        raise FileNotFoundError(f"the file {name} is missing from the package; reinstall AgentRL")
    return found


def existing_or_shipped(path: Path) -> Path:
    """Return the shipped file for a relative path that the working directory does not have.

    The paths that examples and documentation name (`assets/demo/train.jsonl`) thereby work from any
    directory; every other path is returned as it is.
    """
    if path.is_absolute() or path.parts[:1] not in (("assets",), ("examples",)) or path.exists():
        return path
    return _find(path) or path


def _find(path: Path) -> Path | None:
    return next((root / path for root in _ROOTS if (root / path).exists()), None)
