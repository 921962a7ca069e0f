"""`AuditEntry`: one change that a person made to a run."""

import secrets
from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from agentrl.schema.base import Value, utc_now

AuditedAction = Literal[
    "control", "fork", "import", "add tasks", "retry", "rescore", "compact", "cordon", "uncordon"
]


class AuditEntry(Value):
    """Who changed what, and when."""

    id: str = Field(default_factory=lambda: secrets.token_hex(8))
    at: datetime = Field(default_factory=utc_now)
    by: str
    """`user@host` of the process, and where it was done if not in a command."""
    what: AuditedAction
    details: dict[str, Any] = Field(default_factory=dict)
