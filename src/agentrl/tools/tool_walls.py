"""The wall around each program of a run's tools and agents, from the run's flags."""

from collections.abc import Iterable
from pathlib import Path

from agentrl.config.opened_paths import check_shown, opened_paths
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.runtime.processes.wall import Wall, wall_gap


def tool_wall(config: RootConfig, named: Iterable[Path] = (), *, named_by: str = "") -> Wall:
    """Return the wall around a program that names these paths, without a scratch folder."""
    if named_by and wall_gap() is not None and not config.tools.allow_unconfined_tools:
        raise ConfigError(
            f"{named_by}: this machine cannot confine programs ({wall_gap()}), so a model could read and "
            "change all that you can; start the run in a container of its own, or accept it with "
            "--allow_unconfined_tools"
        )
    named = tuple(named)
    check_shown(config, named, named_by)
    visible, writable = opened_paths(config)
    return Wall(readable=(*named, *visible), writable=writable, directory=str(Path.cwd()))
