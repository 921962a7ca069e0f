"""Command lines of settings: those without a flag are written to a file."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import yaml

from agentrl.config.flags import ADVANCED, ORIGINAL
from agentrl.config.loading import nested, read_yaml


def words_of(settings: Mapping[str, object], folder: Path) -> list[str]:
    """Return settings by name as flags; a file below `folder` has those that no flag sets.

    It has the lines of the file that `config` names, too.
    """
    flags = dict(settings)
    advanced = {name: str(flags.pop(name)) for name in settings if name in ADVANCED - {*ORIGINAL}}
    if advanced:
        given = read_yaml(folder / str(flags["config"])) if "config" in flags else {}
        text = yaml.safe_dump(nested(given | advanced))
        file = folder / f"settings-{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        flags["config"] = file
    return [f"--{name}={value}" for name, value in flags.items()]
