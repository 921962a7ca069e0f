"""Bodies of requests and answers: fields of JSON objects, and streams of server-sent events."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from agentrl.errors import APIError
from agentrl.inference.request_bodies import read_json_object
from agentrl.plugins.engine.http.generation_requests import GenerationRequests
from agentrl.plugins.engine.http.http_errors import RequestRejected
from agentrl.plugins.engine.http.request_parsing import ParsedRequest

MAX_CONTROL_BYTES = 4 << 20
"""Largest body of a control route: the names and shapes of a large model's tensors."""


async def answer_frames(requests: GenerationRequests, request: ParsedRequest) -> AsyncIterator[str]:
    """Yield server-sent events with cumulative answers."""
    try:
        async for index, body in requests.stream(request):
            answer = body | {"index": index} if request.is_batch else body
            yield f"data: {json.dumps(answer)}\n\n"
    except RequestRejected as error:
        async for frame in error_frames(str(error), error.status):
            yield frame
        return
    yield "data: [DONE]\n\n"


async def error_frames(message: str, status: int) -> AsyncIterator[str]:
    """Yield server-sent events that report an error and end the stream."""
    error = {
        "message": message,
        "type": "invalid_request_error",
        "code": status,
        "retryable": False,
    }
    yield f"data: {json.dumps({'error': error})}\n\n"
    yield "data: [DONE]\n\n"


def event_stream(frames: AsyncIterator[str]) -> Response:
    """Return a response that sends frames as they arrive."""
    return StreamingResponse(frames, media_type="text/event-stream")


async def json_object(http: Request, max_bytes: int = MAX_CONTROL_BYTES) -> Mapping[str, Any]:
    """Return the body.

    Raises:
        HTTPException: it is not a JSON object, or too large.
    """
    try:
        return await read_json_object(http, max_bytes)
    except APIError as error:
        raise HTTPException(error.status, str(error)) from error


def typed(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return a field, or the default if it is null or missing.

    Raises:
        HTTPException: it is of another type.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise HTTPException(400, f"{name} must be of type {kind.__name__}")
    return value


def required(body: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a required field.

    Raises:
        HTTPException: it is missing, or of another type.
    """
    value = typed(body, name, kind, None)
    if value is None:
        raise HTTPException(400, f"{name} is missing")
    return value


def one_of(body: Mapping[str, Any], name: str, values: tuple[str, ...]) -> str:
    """Return a field that must be one of the values; the first if it is missing.

    Raises:
        HTTPException: it has another value.
    """
    value = body.get(name, values[0])
    if value not in values:
        raise HTTPException(400, f"{name} must be one of {', '.join(values)}")
    return str(value)


def failed(message: str, **details: object) -> Response:
    """Return the response to a command that failed."""
    return JSONResponse({"success": False, "message": message, **details}, 400)


def json_response(content: object) -> Response:
    """Return a body of JSON, written compactly."""
    return Response(json.dumps(content, separators=(",", ":")), media_type="application/json")
