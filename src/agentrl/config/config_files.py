"""Configuration files: YAML (or JSON) with one flag per line, read into values by canonical flag name.

Input: a file's path. Output: values as parsed by YAML. Independent of the
meaning of flags, but refuses common mistakes: duplicate keys, and flags nested in sections.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agentrl.config.flags import canonical_name
from agentrl.config.sections import SECTIONS
from agentrl.config.text_files import read_text_file
from agentrl.errors import ConfigError


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the values of a configuration file by canonical flag name.

    Raises:
        ConfigError: it cannot be read, is not a mapping, or names a flag twice.
    """
    try:
        content = yaml.load(read_text_file(path), _UniqueKeys)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(
            f"--config {path}: nested too deeply; write `flag: value` lines"
        ) from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise ConfigError(f"--config {path} is not valid YAML: {problem}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected `flag: value` lines")
    return canonical_values(content, f"--config {path}")


def canonical_values(given: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Return values by canonical flag name.

    Args:
        given: values by flag name in any spelling.
        where: where they come from, for messages.

    Raises:
        ConfigError: two of the names are one flag, or flags are nested in a section.
    """
    values: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    for key, value in given.items():
        text = str(key)
        if text in SECTIONS and isinstance(value, Mapping):
            raise ConfigError(
                f"{where}: flags are not grouped in sections; remove {text!r} and move the lines "
                "below it to the left margin"
            )
        name = canonical_name(text)
        if name in values:
            raise ConfigError(
                f"{where}: {spellings[name]!r} and {text!r} are the same flag; keep one"
            )
        values[name], spellings[name] = value, text
    return values


class _UniqueKeys(yaml.SafeLoader):
    """Refuses duplicate keys; YAML itself silently uses the last one."""

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
