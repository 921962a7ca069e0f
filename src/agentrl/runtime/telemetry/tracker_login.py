"""Checks the login and the server of Weights & Biases before a run.

Without the check, its library would prompt for a key, or retry for minutes, after the run has
started. Input: the names of trackers. Output: nothing, or an error with a remedy. The library reads
its settings in a separate process, because it leaves a service behind.
"""

import json
import netrc
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.errors import ConfigError
from agentrl.runtime.http.http_clients import unreachable_reason

_SETTINGS_SCRIPT = """
import json, wandb
used = wandb.setup().settings
print(json.dumps([used.mode, used.base_url, bool(used.api_key or used.identity_token_file)]))
"""
_SCRIPT_SECONDS = 30
_ONLINE_MODES = frozenset({"online", "run", "shared"})
_OFFLINE = "set WANDB_MODE=offline to write files for a later `wandb sync`"


def check_login(trackers: Collection[str]) -> None:
    """Check that W&B is usable, if it is one of the trackers."""
    if "wandb" not in trackers:
        return
    try:
        result = subprocess.run(
            [sys.executable, "-c", _SETTINGS_SCRIPT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SCRIPT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--report_to wandb: its settings could not be read within {_SCRIPT_SECONDS} s; "
            f"{_OFFLINE}"
        ) from None
    if result.returncode != 0:
        reason = (result.stderr.splitlines() or ["its settings cannot be read"])[-1]
        raise ConfigError(f"--report_to wandb: {reason}")
    mode, server, has_key = json.loads(result.stdout.splitlines()[-1])
    if mode not in _ONLINE_MODES:
        return
    if not has_key and not _is_in_netrc(server):
        raise ConfigError(
            f"--report_to wandb: no login for {server}; run `wandb login`, set WANDB_API_KEY, or "
            f"{_OFFLINE}"
        )
    failure = unreachable_reason(server)
    if failure is not None:
        raise ConfigError(f"--report_to wandb: {server} cannot be reached ({failure}); {_OFFLINE}")


def _is_in_netrc(server: str) -> bool:
    configured = os.environ.get("NETRC")
    for path in [configured] if configured else ["~/.netrc", "~/_netrc"]:
        try:
            login = netrc.netrc(Path(path).expanduser()).authenticators(urlsplit(server).netloc)
        except (OSError, netrc.NetrcParseError):
            continue
        if login is not None:
            return True
    return False
