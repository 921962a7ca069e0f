"""Which trackers can be reported to; who talks to them is in `trainer.trackers`."""

import importlib.util
from collections.abc import Sequence

from agentrl.config.checks import BUILT_IN_REPORTS
from agentrl.errors import ConfigError


def check_trackers(report_to: Sequence[str]) -> list[str]:
    """Return the names in `--report_to` that need a tracker.

    Raises:
        ConfigError: the package of one is not installed.
    """
    names = [name for name in dict.fromkeys(report_to) if name not in BUILT_IN_REPORTS]
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--report_to {name} needs a package: pip install {name}")
    return names
