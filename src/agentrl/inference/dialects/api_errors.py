"""Errors in OpenAI's shape."""

from typing import Any

from starlette.responses import JSONResponse


class Refusal(Exception):
    """A request that is answered with an error.

    Attributes:
        status: the HTTP status. Clients try 408, 409, 429 and 5xx again, the others not.
        code: the machine-readable reason; clients know `model_not_found` and
            `context_length_exceeded`.
        param: the field of the request at fault, if one is.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """Return the answer to send."""
        return JSONResponse(self.body, self.status)
