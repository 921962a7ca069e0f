"""Names of published adapters: `RUN-1a2b3c-v12`.

The part in the middle is drawn when a trainer starts. A trainer that resumes makes versions again
that servers may know from a future that was lost, and must not find those under its own names.
"""

import re
import secrets

_NAME = re.compile(r"^(?P<run>.+)-[0-9a-f]{6}-v\d+$")


class AdapterNames:
    """The names that one trainer process gives."""

    def __init__(self, run_name: str) -> None:
        self._prefix = f"{run_name}-{secrets.token_hex(3)}"

    def of(self, version: int) -> str:
        """Return the name of a policy version's adapter."""
        return f"{self._prefix}-v{version}"


def is_of_same_run(name: str, other: str) -> bool:
    """Return whether two names are of adapters of one run, by whatever trainer process."""
    found, wanted = _NAME.match(name), _NAME.match(other)
    return found is not None and wanted is not None and found["run"] == wanted["run"]
