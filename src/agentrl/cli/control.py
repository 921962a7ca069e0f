"""`agentrl store set KEY VALUE`: change a running run."""

import asyncio
import getpass
import json
import socket
from collections.abc import Sequence
from typing import Any

from agentrl.cli.rescore import configured_scorer
from agentrl.cli.uri import opened_store
from agentrl.config.loading import parse_flags
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Set one control of a run; samplers and trainer follow within two seconds.

    VALUE is JSON (`true`, `4`, `0.7`) or a scorer's name; `null` goes back to what the processes were
    started with.
    """
    words = list(argv[:2])
    if len(words) < 2 or any(word.startswith("--") for word in words):
        raise ConfigError("say `agentrl store set KEY VALUE --run_name NAME ...`")
    key, text = words
    config = parse_flags(argv[2:])
    if key == "scorer" and text != "null":
        value: Any = configured_scorer(config, text)[0].name
    else:
        value = _json(key, text)
    return asyncio.run(_set(config, key, value))


def _json(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is no value: say true, false, null or a number (for example: {key} 2)"
        ) from None


async def _set(config: RootConfig, key: str, value: Any) -> int:
    async with opened_store(config) as store:
        run = await store.runs.update_control(by=_who(), **{key: value})
        change = run.control_log[-1]
        before, after = change.before.get(key), change.after[key]
        print(f"{run.name}: {key} {json.dumps(before)} -> {json.dumps(after)}")
    return 0


def _who() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"
