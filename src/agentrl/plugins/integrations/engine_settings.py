"""The `config` argument of engines: reading its forms, completing it, and checking interpreters."""

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agentrl.config.named_files import read_text_file
from agentrl.errors import ConfigError
from agentrl.plugins.integrations.agent_worker.references import described

_CHARACTERISTIC_SETTINGS = {
    "verl": {"actor_rollout_ref", "algorithm", "critic", "custom_reward_function"},
    "areal": {"actor", "allocation_mode", "cluster", "gconfig"},
}
"""Engine -> settings by which its configuration is recognized."""


def load_settings(config: Any) -> dict[str, Any]:
    """Return the user's settings; an empty mapping for None."""
    if config is None:
        return {}
    if isinstance(config, str) and config.lstrip().startswith("{"):
        return _parse(config, "config", is_json=True)
    if isinstance(config, str | Path):
        return _load_file(Path(config).expanduser())
    mapping = _as_mapping(config)
    if mapping is None:
        raise ConfigError(
            f"config: {described(config)} is not a configuration; pass a mapping, or the "
            "path of a YAML or JSON file"
        )
    return dict(mapping)


def refuse_settings_of(settings: Mapping[str, Any], engine: str) -> None:
    """Reject the configuration of a different engine."""
    for key in settings:
        name = str(key).partition(".")[0]
        for other, names in _CHARACTERISTIC_SETTINGS.items():
            if name in names and other != engine:
                raise ConfigError(
                    f"config: {name} is a setting of {other}: pass "
                    f'train_engine_name="{other}", or the flags of `agentrl run`'
                )


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with dotted names as nested mappings."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        *path, last = str(name).split(".")
        target = result
        for part in path:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ConfigError(f"config: {name}: {part} has a value of its own")
        if isinstance(value, Mapping):
            existing = target.get(last)
            merged = nested({**(existing if isinstance(existing, dict) else {}), **value})
            target[last] = merged
        else:
            target[last] = value
    return result


def fill(settings: dict[str, Any], dotted: str, value: Any) -> Any:
    """Set a nested value if it is missing or empty; return the resulting value."""
    *path, last = dotted.split(".")
    for name in path:
        settings = settings.setdefault(name, {})
    if settings.get(last) in (None, "", [], {}) and value is not None:
        settings[last] = value
    return settings.get(last)


def checked_program(name: str, given: object) -> str:
    """Return the path of the user's interpreter."""
    if shutil.which(str(given)) is None:
        raise ConfigError(f"config: {name} {given}: program not found")
    return str(given)


def has_package(python: str | Path, package: str, environment: Mapping[str, str]) -> bool:
    """Return whether an interpreter finds a package, without importing it."""
    code = f"import importlib.util as u; print(u.find_spec({package!r}) is not None)"
    process = subprocess.run(
        [python, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    return process.stdout.strip() == "True"


def _as_mapping(config: Any) -> Mapping[str, Any] | None:
    if isinstance(config, Mapping):
        return config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    for method in ("model_dump", "to_dict"):
        if callable(getattr(config, method, None)) and not isinstance(config, type):
            found = getattr(config, method)()
            return found if isinstance(found, Mapping) else None
    values = getattr(config, "__dict__", None)
    return values if values and not isinstance(config, type) and not callable(config) else None


def _load_file(path: Path) -> dict[str, Any]:
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"config: {path}: expected a .yaml, .yml or .json file")
    try:
        text = read_text_file(path)
    except OSError as error:
        raise ConfigError(f"config: {path}: {error.strerror}") from None
    return _parse(text, f"config: {path}", is_json=path.suffix == ".json")


def _parse(text: str, what: str, *, is_json: bool) -> dict[str, Any]:
    try:
        content = json.loads(text) if is_json else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        kind, reason = "JSON" if is_json else "YAML", " ".join(str(error).split())
        raise ConfigError(f"{what} is not valid {kind}: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{what}: expected `name: value` lines")
    return content
