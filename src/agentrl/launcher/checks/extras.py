"""Optional extras of the distribution: their missing packages, and the features that need them."""

import importlib.metadata
import re

from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError

DISTRIBUTION = "agentrl-mongo"
EXTRAS = {
    "mongod": "the private mongod",
    "engine": "the embedded engine",
    "train": "the trainer",
    "data": "Parquet files and Hugging Face datasets",
    "trl": "TRL's engine",
    "trackers": "--report_to",
}
"""Extra -> its purpose."""
_REQUIREMENT = re.compile(r"([\w.-]+).*extra == ['\"](\w+)['\"]")


def missing_packages() -> dict[str, list[str]]:
    """Return the packages of every extra that are not installed.

    The result is empty if AgentRL runs from its sources: nothing then lists its requirements.
    """
    if not _is_installed(DISTRIBUTION):
        return {}
    missing: dict[str, list[str]] = {name: [] for name in EXTRAS}
    for requirement in importlib.metadata.requires(DISTRIBUTION) or ():
        match = _REQUIREMENT.match(requirement)
        if match is not None and match[2] in missing and not _is_installed(match[1]):
            missing[match[2]].append(match[1])
    return missing


def needed_extras(config: RootConfig, *, trains: bool = True) -> set[str]:
    """Return the extras without which `agentrl run` or `agentrl eval` cannot work."""
    inference = config.inference
    is_embedded = inference.inference_backend == "embedded" and not inference.inference_urls
    starts_engine = is_embedded and config.rollout.enable_sampling
    needed = {
        "train": trains,
        "engine": starts_engine,
    }
    return {name for name, is_needed in needed.items() if is_needed}


def what_to_install(name: str, missing: list[str]) -> str:
    """Return what an extra lacks, and how to install it."""
    return (
        f"{', '.join(missing)} not installed, required for {EXTRAS[name]}: pip install "
        f"'{DISTRIBUTION}[{name}]'"
    )


def check_extras(config: RootConfig, *, trains: bool = True) -> None:
    """Check that the processes of a run have their packages."""
    missing = missing_packages()
    for name in sorted(needed_extras(config, trains=trains)):
        if missing.get(name):
            raise ConfigError(what_to_install(name, missing[name]))


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
