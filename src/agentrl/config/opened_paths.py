"""What the programs of tools may see and write to besides what they need to run.

A model decides what runs in a tool. Its programs see what their own command lines name and what
`--tool_visible_paths` and `--tool_writable_paths` open (`runtime.processes.wall`). Neither may show
them the run's answers and state, or a folder of everything.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from agentrl.config.sections import PRIVATE_MONGO_ROOT, RootConfig
from agentrl.errors import ConfigError

_SHIPPED = Path(__file__).resolve().parents[1] / "_data"
"""Of a wheel: the demo's questions are in the environment that every program reads."""
_OF_EVERYTHING = ("/", "/dev", "/etc", "/home", "/proc", "/run", "/sys", "/tmp", "/var")


def opened_paths(config: RootConfig) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return what `--tool_visible_paths` and `--tool_writable_paths` open."""
    tools = config.tools
    for flag in ("tool_visible_paths", "tool_writable_paths"):
        for given in getattr(tools, flag):
            if not given.expanduser().exists():
                raise ConfigError(f"--{flag} {given}: it does not exist")
        check_shown(config, getattr(tools, flag), f"--{flag}")
    for given in tools.tool_writable_paths:
        if not os.access(given.expanduser(), os.W_OK):
            raise ConfigError(f"--tool_writable_paths {given}: you may not write to it")
    return tools.tool_visible_paths, tools.tool_writable_paths


def check_shown(config: RootConfig, paths: Iterable[Path], named_by: str) -> None:
    """Check that none of the paths shows the run's own, or everything, to the programs of tools."""
    opened = {_real(path) for path in config.tools.tool_visible_paths}
    private = {
        real: what
        for path, what in _of_run(config).items()
        if not (real := _real(path)).is_relative_to(_SHIPPED)
    }
    for given in paths:
        path = _real(given)
        if str(path) in _OF_EVERYTHING or Path.home().resolve().is_relative_to(path):
            raise ConfigError(f"{named_by}: {given} shows tools everything; name a folder in it")
        for secret, what in private.items():
            if secret.is_relative_to(path) and secret not in opened:
                holds = "is" if secret == path else "holds"
                raise ConfigError(f"{named_by}: {given} {holds} {what}, which tools must not see")
            if path.is_relative_to(secret) and path not in opened:
                raise ConfigError(f"{named_by}: {given} is in {what}, which tools must not see")


def _of_run(config: RootConfig) -> dict[Path, str]:
    paths = {
        PRIVATE_MONGO_ROOT.parent: "the state of runs",
        Path(".env"): "variables of the run",
        Path("output"): "the output of runs",
        config.run.output_path: "the run's output",
        config.private_mongo_dir: "the run's database",
        config.run.logs_dir: "the run's logs",
    }
    for answers in (config.data.train_file, config.data.eval_file):
        if answers is not None:
            paths[answers] = "the run's answers"
    if config.rollout.agent_config_path is not None:
        paths[config.rollout.agent_config_path] = "the run's agent_config"
    return paths


def _real(path: Path) -> Path:
    return path.expanduser().resolve()
