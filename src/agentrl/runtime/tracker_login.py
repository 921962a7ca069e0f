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
from agentrl.runtime.outside import no_answer

_LOOK = """
import json, wandb
given = wandb.setup().settings
print(json.dumps([given.mode, given.base_url, bool(given.api_key or given.identity_token_file)]))
"""
_LOOK_SECONDS = 30
_SENDING = frozenset({"online", "run", "shared"})
_OFFLINE = "set WANDB_MODE=offline to write files for a later `wandb sync`"


def check_login(trackers: Collection[str]) -> None:
    """Check that W&B is usable, if it is one of the trackers.

    Raises:
        ConfigError: the login is missing, or the server does not respond.
    """
    if "wandb" not in trackers:
        return
    try:
        looked = subprocess.run(
            [sys.executable, "-c", _LOOK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LOOK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--report_to wandb: its settings could not be read within {_LOOK_SECONDS} s; "
            f"{_OFFLINE}"
        ) from None
    if looked.returncode != 0:
        reason = (looked.stderr.splitlines() or ["its settings cannot be read"])[-1]
        raise ConfigError(f"--report_to wandb: {reason}")
    mode, server, has_key = json.loads(looked.stdout.splitlines()[-1])
    if mode not in _SENDING:
        return
    if not has_key and not _is_in_netrc(server):
        raise ConfigError(
            f"--report_to wandb: no login for {server}; run `wandb login`, set WANDB_API_KEY, or "
            f"{_OFFLINE}"
        )
    silence = no_answer(server)
    if silence is not None:
        raise ConfigError(f"--report_to wandb: {server} cannot be reached ({silence}); {_OFFLINE}")


def _is_in_netrc(server: str) -> bool:
    given = os.environ.get("NETRC")
    for path in [given] if given else ["~/.netrc", "~/_netrc"]:
        try:
            found = netrc.netrc(Path(path).expanduser()).authenticators(urlsplit(server).netloc)
        except (OSError, netrc.NetrcParseError):
            continue
        if found is not None:
            return True
    return False
