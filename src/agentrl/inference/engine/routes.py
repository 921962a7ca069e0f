"""The HTTP routes: the part of SGLang's that samplers and publishers use.

Three shapes of errors are answered, as SGLang does: `{"error": {"message"}}` for broken rules,
`{"error": ".."}` for wrong sampling parameters, `{"object": "error", ..}` for everything else.

Deliberate differences: seeds always count, `/health` never samples, a request that waits at a pause
can be aborted, and what SGLang answers with 500 or dies of (token ids beyond the vocabulary) is
refused.
"""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.errors import InferenceError
from agentrl.inference.engine.frontend import BadRequest, FrontEnd, NotFlushed, Refused
from agentrl.inference.engine.parsing import BadShape, BadType, ParsedRequest
from agentrl.inference.engine.scheduler import PauseMode

SGLANG_VERSION = "0.5.23"
"""The release whose HTTP is followed; clients choose what to rely upon by it."""
_PAUSE_MODES = ("abort", "retract", "in_place")
_SELECTORS = ("all", "target", "draft")
_CONTROL_PATHS = frozenset(
    {
        "/abort_request",
        "/begin_weight_update",
        "/continue_generation",
        "/end_weight_update",
        "/flush_cache",
        "/pause_generation",
        "/update_weight_version",
        "/update_weights_from_disk",
    }
)
_OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready"})
_NOT_FLUSHED = "Weights were updated, but the cache was not flushed because requests are running."

Handler = Callable[[Request], Awaitable[Response]]


def make_app(front_end: FrontEnd) -> Starlette:
    """Return the application over a front end that was started."""
    routes = _Routes(front_end)
    get, post, both = ["GET"], ["POST"], ["GET", "POST"]
    app = Starlette(
        routes=[
            Route("/health", routes.health, methods=get),
            Route("/health_generate", routes.health, methods=get),
            Route("/ready", routes.ready, methods=get),
            Route("/ping", routes.health, methods=get),
            Route("/model_info", routes.model_info, methods=get),
            Route("/get_model_info", routes.model_info, methods=get),
            Route("/server_info", routes.server_info, methods=get),
            Route("/get_server_info", routes.server_info, methods=get),
            Route("/v1/models", routes.models, methods=get),
            Route("/v1/loads", routes.loads, methods=get),
            Route("/generate", routes.generate, methods=["POST", "PUT"]),
            Route("/abort_request", routes.abort, methods=post),
            Route("/pause_generation", routes.pause, methods=post),
            Route("/continue_generation", routes.resume, methods=post),
            Route("/flush_cache", routes.flush, methods=both),
            Route("/update_weights_from_disk", routes.update_weights, methods=post),
            Route("/update_weight_version", routes.update_label, methods=post),
            Route("/begin_weight_update", routes.begin_update, methods=post),
            Route("/end_weight_update", routes.end_update, methods=post),
        ],
        exception_handlers={
            BadRequest: _on_bad_request,
            Refused: _on_refused,
            HTTPException: _on_http_exception,
        },
    )
    app.add_middleware(_Authorization, front_end=front_end)
    return app


class _Authorization:
    """Bearer keys: one for data, one for control. A bare ASGI layer, so that streams pass freely."""

    def __init__(self, app: Any, front_end: FrontEnd) -> None:
        self._app = app
        data, admin = front_end.config.api_key, front_end.config.admin_api_key
        self._data_key = data.get_secret_value() if data else None
        self._admin_key = admin.get_secret_value() if admin else self._data_key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            key = self._admin_key if path in _CONTROL_PATHS else self._data_key
            if key is not None and path not in _OPEN_PATHS and not _has_key(scope, key):
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _has_key(scope: Any, key: str) -> bool:
    wanted = f"Bearer {key}".encode()
    return any(
        name == b"authorization" and hmac.compare_digest(value, wanted)
        for name, value in scope["headers"]
    )


class _Routes:
    """Handlers; one method a route."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._engine = front_end
        self._is_session_open = False

    async def health(self, _: Request) -> Response:
        return Response(status_code=200 if self._engine.is_serving else 503)

    async def ready(self, _: Request) -> Response:
        is_ready = self._engine.is_serving and not self._engine.is_paused
        return Response(status_code=200 if is_ready else 503)

    async def model_info(self, _: Request) -> Response:
        engine = self._engine
        return JSONResponse(
            {
                "model_path": engine.model_path,
                "served_model_name": engine.served_model_name,
                "tokenizer_path": engine.config.model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": engine.weight_version,
                "load_format": "safetensors",
                "model_type": engine.model_type,
                "architectures": engine.architectures,
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    async def server_info(self, _: Request) -> Response:
        engine = self._engine
        load = await engine.load()
        return JSONResponse(
            {
                "version": SGLANG_VERSION,
                "frontend": "agentrl",
                "model_path": engine.model_path,
                "served_model_name": engine.served_model_name,
                "tp_size": 1,
                "dp_size": 1,
                "context_length": engine.limits.context_length,
                "max_total_num_tokens": load.max_tokens,
                "max_running_requests": engine.config.max_running_requests,
                "incremental_streaming_output": False,
                "internal_states": [{}],
                **engine.counters(),
            }
        )

    async def models(self, _: Request) -> Response:
        engine = self._engine
        card = {
            "id": engine.served_model_name,
            "object": "model",
            "created": engine.started_at,
            "owned_by": "sglang",
            "root": engine.served_model_name,
            "parent": None,
            "max_model_len": engine.limits.context_length,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def loads(self, _: Request) -> Response:
        load = await self._engine.load()
        rank = {
            "dp_rank": 0,
            "num_running_reqs": load.num_running,
            "num_waiting_reqs": load.num_waiting,
            "num_waiting_uncached_tokens": load.num_waiting_tokens,
            "num_used_tokens": load.num_used_tokens,
            "num_total_tokens": load.num_used_tokens + load.num_prefix_tokens,
            "max_total_num_tokens": load.max_tokens,
            "max_running_requests": self._engine.config.max_running_requests,
            "token_usage": load.num_used_tokens / load.max_tokens,
        }
        return JSONResponse({"timestamp": time.time(), "version": SGLANG_VERSION, "loads": [rank]})

    async def generate(self, http: Request) -> Response:
        body = await _json_object(http)
        try:
            parsed = self._engine.parse(body)
        except BadRequest as error:
            # Who asked for a stream is told of a broken rule in the stream.
            if type(error) is not BadRequest or body.get("stream") is not True:
                raise
            return _event_stream(_error_frames(str(error), 400))
        if parsed.stream:
            return _event_stream(_frames(self._engine, parsed))
        answers = await _unless_disconnected(http, self._engine.generate(parsed))
        return _json(answers if parsed.is_batch else answers[0])

    async def abort(self, http: Request) -> Response:
        body = await _json_object(http)
        rid = _typed(body, "rid", str, None)
        if _typed(body, "abort_all", bool, False):
            self._engine.abort(None)
        elif rid:
            self._engine.abort(rid)
        return Response()

    async def pause(self, http: Request) -> Response:
        mode = _one_of(await _json_object(http), "mode", _PAUSE_MODES)
        await self._engine.pause(cast(PauseMode, mode))
        return JSONResponse({"message": f"Generation paused ({mode}).", "status": "ok"})

    async def resume(self, http: Request) -> Response:
        await _json_object(http)
        await self._engine.resume()
        return JSONResponse({"message": "Generation continued.", "status": "ok"})

    async def flush(self, _: Request) -> Response:
        if await self._engine.flush():
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Cache not flushed: requests are running.\n", 400)

    async def update_weights(self, http: Request) -> Response:
        body = await _json_object(http)
        path = _typed(body, "model_path", str, None)
        if path is None:
            raise HTTPException(400, "model_path is missing")
        try:
            num_kept = await self._engine.update_weights(
                path,
                _typed(body, "weight_version", str, None),
                flush=_typed(body, "flush_cache", bool, True),
                abort_all=_typed(body, "abort_all_requests", bool, False),
            )
        except InferenceError as error:
            return _failed(f"Weights not loaded: {error}", num_paused_requests=0)
        except NotFlushed:
            return _failed(_NOT_FLUSHED, num_paused_requests=0)
        message = "Weights were updated."
        return JSONResponse({"success": True, "message": message, "num_paused_requests": num_kept})

    async def update_label(self, http: Request) -> Response:
        body = await _json_object(http)
        label = _typed(body, "new_version", str, None)
        if label is None:
            raise HTTPException(400, "new_version is missing")
        abort_all = _typed(body, "abort_all_requests", bool, True)
        await self._engine.update_label(label, abort_all=abort_all)
        return JSONResponse(
            {"success": True, "message": "Version was updated.", "new_version": label}
        )

    async def begin_update(self, http: Request) -> Response:
        _one_of(await _json_object(http), "selector", _SELECTORS)
        return self._session(opens=True)

    async def end_update(self, http: Request) -> Response:
        await _json_object(http)
        return self._session(opens=False)

    def _session(self, *, opens: bool) -> Response:
        if opens == self._is_session_open:
            message = "a weight update is open" if opens else "no weight update is open"
            return _failed(message)
        self._is_session_open = opens
        return JSONResponse({"success": True, "message": "ok"})


async def _frames(engine: FrontEnd, request: ParsedRequest) -> AsyncIterator[str]:
    """Server-sent events with cumulative answers."""
    try:
        async for index, body in engine.stream(request):
            answer = body | {"index": index} if request.is_batch else body
            yield f"data: {json.dumps(answer)}\n\n"
    except Refused as error:
        async for frame in _error_frames(str(error), error.status):
            yield frame
        return
    yield "data: [DONE]\n\n"


async def _error_frames(message: str, status: int) -> AsyncIterator[str]:
    fault = {
        "message": message,
        "type": "invalid_request_error",
        "code": status,
        "retryable": False,
    }
    yield f"data: {json.dumps({'error': fault})}\n\n"
    yield "data: [DONE]\n\n"


def _event_stream(frames: AsyncIterator[str]) -> Response:
    return StreamingResponse(frames, media_type="text/event-stream")


async def _unless_disconnected(
    http: Request, work: Awaitable[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Cancel the work when the client goes away."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "the client is gone")
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()


async def _disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _json_object(http: Request) -> Mapping[str, Any]:
    try:
        body = json.loads(await http.body())
    except ValueError as error:
        raise HTTPException(400, f"the body has to be JSON: {error}") from error
    if not isinstance(body, dict):
        raise HTTPException(400, "the body has to be a JSON object")
    return body


def _typed(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise HTTPException(400, f"{name} has to be of type {kind.__name__}")
    return value


def _one_of(body: Mapping[str, Any], name: str, values: tuple[str, ...]) -> str:
    """Return a field that has to be one of the values; the first when it is left out."""
    value = body.get(name, values[0])
    if value not in values:
        raise HTTPException(400, f"{name} has to be one of {', '.join(values)}")
    return str(value)


def _failed(message: str, **details: object) -> Response:
    return JSONResponse({"success": False, "message": message, **details}, 400)


def _json(content: object) -> Response:
    return Response(json.dumps(content, separators=(",", ":")), media_type="application/json")


async def _on_bad_request(_: Request, error: Exception) -> Response:
    message = str(error)
    if isinstance(error, BadShape):
        return _openai_error(message, 400)
    return JSONResponse(
        {"error": message if isinstance(error, BadType) else {"message": message}}, 400
    )


async def _on_refused(_: Request, error: Exception) -> Response:
    return _openai_error(str(error), cast(Refused, error).status)


async def _on_http_exception(_: Request, error: Exception) -> Response:
    fault = cast(HTTPException, error)
    if fault.status_code in (404, 405):
        return JSONResponse({"detail": fault.detail}, fault.status_code)
    return _openai_error(fault.detail, fault.status_code)


def _openai_error(message: str, status: int) -> Response:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return JSONResponse(body, status)
