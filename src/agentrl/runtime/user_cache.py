"""Where this package keeps what it can make again."""

import os
from pathlib import Path


def user_cache(kind: str) -> Path:
    """Return the directory of one kind of cached files, `$XDG_CACHE_HOME/agentrl/KIND`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "agentrl" / kind
