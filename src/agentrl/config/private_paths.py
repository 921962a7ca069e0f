"""What the tools of a run have no use for: its state, answers, secrets, and its servers' ports.

A model decides what runs in a tool. Programs that AgentRL starts for it (stdio servers, the tool
server) see these paths as empty and write only where they may where namespaces exist, and reach none
of these ports where the kernel has Landlock (`runtime.processes.confinement`).
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.config.sections import PRIVATE_MONGO_ROOT, RootConfig
from agentrl.errors import ConfigError

_IN_HOME = (
    *(".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".config/gcloud", ".config/gh"),
    *(".netrc", ".pypirc", ".git-credentials", ".mongodb", ".mongorc.js", ".mongoshrc.js"),
    *(".cache/huggingface/token", ".huggingface", ".config/wandb", ".config/agentrl"),
)
"""Keys and logins by the names of the programs that keep them there."""
_IN_FOLDER = (".env", "output", str(PRIVATE_MONGO_ROOT.parent))
"""Of the working directory: variables, and what AgentRL keeps of all runs started there."""
_MONGODB_PORT = 27017
_WEB_PORTS = {"http": 80, "https": 443}


def user_secrets() -> tuple[Path, ...]:
    """Return where this user and the runs of the working directory keep what is theirs alone."""
    home = Path.home()
    paths = (
        *(home / name for name in _IN_HOME),
        *(Path.cwd() / name for name in _IN_FOLDER),
        # Sockets of the login: keys, and a service manager that starts programs outside.
        Path(f"/run/user/{home.stat().st_uid}"),
    )
    return tuple(path for path in paths if path.exists())


def private_paths(config: RootConfig) -> tuple[Path, ...]:
    """Return the paths that tools of a run do not see: `user_secrets`, its state, and its answers.

    `--tool_visible_paths` are left out, and so is a directory that contains the working directory,
    without which no program could start.
    """
    visible = {path.expanduser().resolve() for path in config.tools.tool_visible_paths}
    here = Path.cwd()
    found = dict.fromkeys(path.expanduser().resolve() for path in _of_run(config))
    return tuple(path for path in found if path not in visible and not here.is_relative_to(path))


def writable_paths(config: RootConfig) -> tuple[Path, ...]:
    """Return `--tool_writable_paths`: where tools of a run write besides their scratch directories.

    Raises:
        ConfigError: a path does not exist, is not the user's to write to, or lies in one that tools
            do not see.
    """
    hidden = private_paths(config)
    return tuple(_writable(given, hidden) for given in config.tools.tool_writable_paths)


def _writable(given: Path, hidden: Sequence[Path]) -> Path:
    path = given.expanduser().resolve()
    within = next((one for one in hidden if path.is_relative_to(one)), None)
    if within is not None:
        reason = f"{within} is hidden from tools" if path != within else "it is hidden from tools"
    elif not path.exists():
        reason = "it does not exist"
    elif not os.access(path, os.W_OK):
        reason = "you may not write to it"
    else:
        return path
    raise ConfigError(f"--tool_writable_paths {given}: {reason}")


def private_ports(config: RootConfig) -> tuple[int, ...]:
    """Return the ports of the database and of `--inference_urls`, to which no tool of a run connects.

    `--tool_visible_ports` are left out, and so are 80 and 443, which tools need for the internet.
    """
    uri = config.store.db_connection_string
    hosts = "" if uri is None else urlsplit(uri.get_secret_value()).netloc.rpartition("@")[2]
    found = {urlsplit(f"//{host}").port or _MONGODB_PORT for host in filter(None, hosts.split(","))}
    for url in config.inference.inference_urls:
        parts = urlsplit(url)
        found.add(parts.port or _WEB_PORTS.get(parts.scheme, 80))
    return tuple(sorted(found - {*_WEB_PORTS.values(), *config.tools.tool_visible_ports}))


def visible_path_notes(config: RootConfig) -> list[str]:
    """Return a note on each of `--tool_visible_paths` that shows nothing to tools."""
    hidden = {path.expanduser().resolve() for path in _of_run(config)}
    still_hidden = private_paths(config)
    notes = []
    for given in config.tools.tool_visible_paths:
        path = given.expanduser().resolve()
        within = next((one for one in still_hidden if path.is_relative_to(one)), None)
        if within is not None:
            reason = f"it lies in {within}, which is hidden; name that directory instead"
        elif path not in hidden:
            reason = "it is not hidden from tools"
        else:
            continue
        notes.append(f"--tool_visible_paths {given} has no effect: {reason}")
    return notes


def _of_run(config: RootConfig) -> Iterator[Path]:
    yield from user_secrets()
    yield from (config.run.output_path, config.private_mongo_dir, config.run.logs_dir)
    for answers in (config.data.train_file, config.data.eval_file):
        if answers is not None:
            yield answers
    if config.rollout.agent_config_path is not None:
        yield config.rollout.agent_config_path
