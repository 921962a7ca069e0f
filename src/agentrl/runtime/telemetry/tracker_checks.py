"""`--report_to`: checks that the requested trackers are usable, before anything starts.

Input: names. Output: the names that need a tracker, or a one-line error. Trackers with a local
store need nothing else; a server set in a tracker's own variable must respond.
"""

import importlib.util
import os
from collections.abc import Sequence
from urllib.parse import urlsplit

from agentrl.config.validation.checks import BUILT_IN_REPORTS
from agentrl.errors import ConfigError
from agentrl.runtime.http.http_clients import unreachable_reason

_SERVERS = {"mlflow": "MLFLOW_TRACKING_URI", "trackio": "TRACKIO_SERVER_URL"}
"""Tracker -> the environment variable of its server."""


def check_trackers(report_to: Sequence[str]) -> list[str]:
    """Return the names in `--report_to` that need a tracker."""
    names = [name for name in dict.fromkeys(report_to) if name not in BUILT_IN_REPORTS]
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--report_to {name} needs a package: pip install {name}")
        _check_server(name)
    return names


def _check_server(name: str) -> None:
    variable = _SERVERS.get(name)
    url = os.environ.get(variable, "") if variable is not None else ""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        return
    reason = unreachable_reason(url)
    if reason is not None:
        address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        raise ConfigError(
            f"--report_to {name}: the server at {address} ({variable}) does not respond: {reason}"
        )
