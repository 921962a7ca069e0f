"""Why a call to an inference server failed, as far as it decides what to do next.

InferenceError
├── ServerUnreachable   no answer: it is down, restarting, or the network is; try another one
└── ServerRefused       it answered with an error status
"""

from collections.abc import Mapping
from typing import Any

from agentrl.errors import InferenceError


class ServerUnreachable(InferenceError):
    """The server gave no answer at all."""


class ServerRefused(InferenceError):
    """The server answered with an error.

    Attributes:
        status: the HTTP status, or the one that an aborted generation carried.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later or elsewhere."""
        return self.status >= 500 or self.status in (408, 429) or self.lacks_adapter

    @property
    def lacks_adapter(self) -> bool:
        """Whether it named an adapter that was taken out; that of its successor is to be heard of."""
        return self.status == 400 and "not loaded" in str(self)


def error_message(body: object) -> str:
    """Return what an error body says, in any of the shapes that SGLang answers with.

    The shapes are `{"error": {"message": ..}}`, `{"error": ".."}`, `{"message": ..}` (with
    `object: error`, or `success: false`), `{"error_message": ..}` of the adapters' routes and the
    framework's `{"detail": ..}`.
    """
    if not isinstance(body, Mapping):
        return str(body).strip()[:500]
    fields: Mapping[str, Any] = body
    error = fields.get("error")
    if isinstance(error, Mapping):
        return str(error.get("message", error))
    for value in (error, *(fields.get(n) for n in ("message", "error_message", "detail"))):
        if value:
            return str(value)
    return str(dict(fields))[:500]
