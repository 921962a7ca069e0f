"""Files that flags name: where they are, and the text of configurations, tool servers and templates.

The package ships the demo, the example tool server and the FSDP configuration. A wheel carries them
in `agentrl/_data`; a checkout (an editable install) has them at the top of the repository, and flags
name them as there: `assets/demo/model`.

A text is read at once or not at all: a pipe would block its reader, and a device such as /dev/zero
has no end.
"""

import errno
import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

_PACKAGE = Path(__file__).parents[1]
_ROOTS = (_PACKAGE / "_data", _PACKAGE.parents[1])
_MAX_CHARS = 16 << 20
_NOT_DECIMAL = re.compile(r"[-+]?0[0-9_]+|.*:.*")


def shipped_file(name: str) -> Path:
    """Return the absolute path of a file or directory that ships with the package."""
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


def read_text_file(path: Path) -> str:
    """Return the text of a regular file of at most 16 Mi characters, without a byte order mark."""
    try:
        with open(path, encoding="utf-8-sig", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "devices and pipes are not supported; give a file")
            text = file.read(_MAX_CHARS + 1)
    except FileNotFoundError as error:
        error.strerror = f"{error.strerror} in {path.absolute().parent}"
        raise
    except UnicodeDecodeError:
        raise OSError(errno.EILSEQ, "not UTF-8 text; save it as UTF-8") from None
    if len(text) > _MAX_CHARS:
        raise OSError(
            errno.EFBIG, f"longer than {_MAX_CHARS >> 20} Mi characters; give a shorter file"
        )
    return text


def _open_at_once(path: str, flags: int) -> int:
    # Opening a pipe would otherwise wait for its writer.
    return os.open(path, flags | os.O_NONBLOCK)


class YamlAsTyped(yaml.SafeLoader):
    """Reads values as a person means them, where YAML 1.1 silently makes something else of them.

    Duplicate keys, of which YAML uses the last one, are refused. Times such as `1:30` (in YAML 90),
    numbers with a leading zero such as `010` (in YAML 8) and dates stay text, as on the command
    line.
    """

    yaml_implicit_resolvers = {
        start: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
        for start, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    None, None, f"{key.value!r} occurs twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _integer(loader: YamlAsTyped, node: yaml.ScalarNode) -> int | str:
    text: str = node.value
    return text if _NOT_DECIMAL.fullmatch(text) else loader.construct_yaml_int(node)


def _number(loader: YamlAsTyped, node: yaml.ScalarNode) -> float | str:
    text: str = node.value
    return text if ":" in text else loader.construct_yaml_float(node)


YamlAsTyped.add_constructor("tag:yaml.org,2002:int", _integer)
YamlAsTyped.add_constructor("tag:yaml.org,2002:float", _number)
