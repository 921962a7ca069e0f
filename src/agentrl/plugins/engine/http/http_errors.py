"""Errors of requests: the exceptions that end a handler, and their format for clients.

The exceptions are this server's control flow: they become a response and never leave the process.
The forms are `{"error": {"message"}}` for invalid requests, `{"error": ".."}` for wrong sampling
parameters, and `{"object": "error", ..}` for everything else, as SGLang answers.
"""

from typing import cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from agentrl.errors import APIError


class InvalidRequest(Exception):
    """The request is invalid; the message gives the reason."""


class InvalidParameter(InvalidRequest):
    """A sampling parameter is unknown or has the wrong JSON type, such as a number for a flag."""


class InvalidField(InvalidRequest):
    """A field other than a sampling parameter has the wrong JSON type."""


class RequestRejected(Exception):
    """A valid request that cannot be served, with the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


async def on_invalid_request(_: Request, error: Exception) -> Response:
    """Answer an `InvalidRequest`."""
    message = str(error)
    if isinstance(error, InvalidField):
        return _openai_error(message, 400)
    return JSONResponse(
        {"error": message if isinstance(error, InvalidParameter) else {"message": message}}, 400
    )


async def on_rejected(_: Request, error: Exception) -> Response:
    """Answer a `RequestRejected`, or an `APIError` of a body that cannot be read."""
    return _openai_error(str(error), cast(RequestRejected | APIError, error).status)


async def on_http_exception(_: Request, error: Exception) -> Response:
    """Answer an `HTTPException`."""
    http_error = cast(HTTPException, error)
    if http_error.status_code in (404, 405):
        return JSONResponse({"detail": http_error.detail}, http_error.status_code)
    return _openai_error(http_error.detail, http_error.status_code)


def _openai_error(message: str, status: int) -> Response:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return JSONResponse(body, status)
