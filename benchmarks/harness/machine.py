"""The conditions of a benchmark: the machine, its load and the versions."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any


def machine() -> dict[str, Any]:
    """Return the conditions of a benchmark."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "pymongo": version("pymongo"),
    }
