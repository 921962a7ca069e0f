"""The HTTP routes: the part of SGLang's that samplers and publishers use.

Deliberate differences: seeds always apply, `/health` never samples, and a request that waits during
a pause can be aborted. Requests that SGLang answers with 500 or that crash it (token ids beyond the
vocabulary) are refused, and so are broadcasts as one flattened bucket. Broadcast weights are
received in place: a failed broadcast leaves the label of no policy.
"""

import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Literal, TypeVar

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.distributed.broadcast import RankAssignment
from agentrl.errors import APIError, InferenceError
from agentrl.inference import openapi
from agentrl.inference.request_bodies import read_json_object, while_connected
from agentrl.inference.wire import PauseMode
from agentrl.plugins.engine.http.engine_bodies import (
    Body,
    GenerationBody,
    ParsedRequest,
    read_body,
)
from agentrl.plugins.engine.http.frontend import FrontEnd
from agentrl.plugins.engine.http.http_errors import (
    InvalidRequest,
    RequestRejected,
    on_http_exception,
    on_invalid_request,
    on_rejected,
)
from agentrl.plugins.engine.weights.weight_receiver import WeightManifest
from agentrl.runtime.http.http_guard import HttpGuard

SGLANG_VERSION = "0.5.23"
"""The SGLang release whose API is implemented; clients choose features by it."""
_MAX_CONTROL_BYTES = 4 << 20
"""Largest body of a control route: the names and shapes of a large model's tensors."""
_RATE_SECONDS = 5.0
"""Least time over which the rate of sampling is measured."""
_OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready"})
_NOT_FLUSHED = "Weights were updated, but the cache was not flushed because requests are running."


def make_app(front_end: FrontEnd) -> Starlette:
    """Return the application over a front end that was started."""
    routes = _Routes(front_end)
    get, post, get_or_post = ["GET"], ["POST"], ["GET", "POST"]
    data = [
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
    ]
    control = [
        Route("/abort_request", routes.abort, methods=post),
        Route("/pause_generation", routes.pause, methods=post),
        Route("/continue_generation", routes.resume, methods=post),
        Route("/flush_cache", routes.flush, methods=get_or_post),
        Route("/update_weights_from_disk", routes.update_weights, methods=post),
        Route("/update_weight_version", routes.update_label, methods=post),
        Route("/release_memory_occupation", routes.release_memory, methods=get_or_post),
        Route("/resume_memory_occupation", routes.resume_memory, methods=get_or_post),
        Route("/load_lora_adapter", routes.load_adapter, methods=post),
        Route("/unload_lora_adapter", routes.unload_adapter, methods=post),
        Route("/begin_weight_update", routes.begin_update, methods=post),
        Route("/end_weight_update", routes.end_update, methods=post),
        Route("/init_weights_update_group", routes.join_group, methods=post),
        Route("/destroy_weights_update_group", routes.leave_group, methods=post),
        Route("/update_weights_from_distributed", routes.update_from_group, methods=post),
    ]
    document = openapi.description(
        "AgentRL engine", [*data, *control], {"/generate": openapi.schema_of(GenerationBody)}
    )

    async def describe(_: Request) -> Response:
        return JSONResponse(document)

    app = Starlette(
        routes=[*data, *control, Route(openapi.PATH, describe, methods=get)],
        exception_handlers={
            InvalidRequest: on_invalid_request,
            RequestRejected: on_rejected,
            APIError: on_rejected,
            HTTPException: on_http_exception,
        },
    )
    control_paths = frozenset(route.path for route in control)
    app.add_middleware(_Authorization, front_end=front_end, control_paths=control_paths)
    app.add_middleware(HttpGuard, host=front_end.config.host)
    return app


class _Authorization:
    """Bearer keys: one for data, one for control. A bare ASGI layer, which does not buffer streams."""

    def __init__(self, app: Any, front_end: FrontEnd, control_paths: frozenset[str]) -> None:
        self._app = app
        self._control_paths = control_paths
        data, admin = front_end.config.api_key, front_end.config.admin_api_key
        self._data_key = data.get_secret_value() if data else None
        self._admin_key = admin.get_secret_value() if admin else self._data_key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            key = self._admin_key if path in self._control_paths else self._data_key
            if key is not None and path not in _OPEN_PATHS and not _has_key(scope, key):
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _has_key(scope: Any, key: str) -> bool:
    expected = f"Bearer {key}".encode()
    return any(
        name == b"authorization" and hmac.compare_digest(value, expected)
        for name, value in scope["headers"]
    )


class _Abort(Body):
    rid: str = ""
    abort_all: bool = False


class _Pause(Body):
    NOT_NULL = frozenset({"mode"})

    mode: PauseMode = "abort"


class _Update(Body):
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class _UpdateFromDisk(_Update):
    NOT_NULL = frozenset({"load_format"})

    model_path: str
    load_format: Literal["auto"] = "auto"


class _Label(Body):
    new_version: str
    abort_all_requests: bool = True


class _Memory(Body):
    tags: list[str] = []
    """Parts of the memory; none means all."""


class _AdapterName(Body):
    lora_name: str = Field(min_length=1)


class _AdapterSource(_AdapterName):
    lora_path: str = Field(min_length=1)


class _OpenUpdate(Body):
    NOT_NULL = frozenset({"selector"})

    selector: Literal["all", "target", "draft"] = "all"


class _Group(Body):
    group_name: str = "weight_update_group"


class _JoinGroup(_Group):
    backend: str = "nccl"
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


class _UpdateFromGroup(_Group, _Update):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    load_format: str | None = None


_AnyBody = TypeVar("_AnyBody", bound=Body)


class _Routes:
    """Handlers, one method per route."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._engine = front_end
        self._is_update_open = False
        self._rate, self._sampled = 0.0, (time.monotonic(), 0)

    async def health(self, _: Request) -> Response:
        return Response(status_code=200 if self._engine.is_healthy else 503)

    async def ready(self, _: Request) -> Response:
        is_ready = self._engine.is_serving and not self._engine.scheduler.is_paused
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
                "has_image_understanding": engine.images.are_read,
                "has_audio_understanding": False,
            }
        )

    async def server_info(self, _: Request) -> Response:
        engine, scheduler = self._engine, self._engine.scheduler
        return JSONResponse(
            {
                "version": SGLANG_VERSION,
                "frontend": "agentrl",
                "model_path": engine.model_path,
                "served_model_name": engine.served_model_name,
                "tp_size": 1,
                "dp_size": 1,
                "context_length": engine.limits.context_length,
                "max_total_num_tokens": scheduler.max_tokens,
                "max_running_requests": engine.config.max_running_requests,
                "enable_priority_scheduling": True,
                "incremental_streaming_output": False,
                "enable_memory_saver": True,
                "internal_states": [{}],
                "num_sampled_tokens": scheduler.num_sampled,
                "num_prefilled_tokens": scheduler.num_prefilled,
                "num_cached_tokens": scheduler.num_cached,
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
        adapters = [
            card | {"id": name, "root": adapter.path, "parent": card["id"], "max_model_len": None}
            for name, adapter in engine.adapters.items()
        ]
        return JSONResponse({"object": "list", "data": [card, *adapters]})

    async def loads(self, _: Request) -> Response:
        load = await self._engine.call(self._engine.scheduler.load)
        rank = {
            "dp_rank": 0,
            "num_running_reqs": load.num_running,
            "num_waiting_reqs": load.num_waiting,
            "num_waiting_uncached_tokens": load.num_waiting_tokens,
            "num_used_tokens": load.num_used_tokens,
            "num_total_tokens": load.num_used_tokens + load.num_prefix_tokens,
            "max_total_num_tokens": load.max_tokens,
            "max_running_requests": self._engine.config.max_running_requests,
            "token_usage": load.token_usage,
            "gen_throughput": self._sampling_rate(),
        }
        return JSONResponse({"timestamp": time.time(), "version": SGLANG_VERSION, "loads": [rank]})

    def _sampling_rate(self) -> float:
        """Return the tokens sampled a second over the last seconds."""
        (since, before), now = self._sampled, time.monotonic()
        num = self._engine.scheduler.num_sampled
        if now - since >= _RATE_SECONDS:
            self._rate, self._sampled = (num - before) / (now - since), (now, num)
        return self._rate

    async def generate(self, http: Request) -> Response:
        body = await read_json_object(http, self._engine.max_body_bytes)
        try:
            parsed = await self._engine.parse(body)
        except InvalidRequest as error:
            # A client that requested a stream gets errors in the stream.
            if type(error) is not InvalidRequest or body.get("stream") is not True:
                raise
            return _event_stream(_error_frames(str(error), 400))
        if parsed.body.stream:
            return _event_stream(self._answer_frames(parsed))
        answers = await while_connected(http, self._engine.generate(parsed))
        content = json.dumps(answers if parsed.is_batch else answers[0], separators=(",", ":"))
        return Response(content, media_type="application/json")

    async def _answer_frames(self, request: ParsedRequest) -> AsyncIterator[str]:
        """Yield server-sent events with cumulative answers."""
        try:
            async for index, body in self._engine.stream(request):
                answer = body | {"index": index} if request.is_batch else body
                yield f"data: {json.dumps(answer)}\n\n"
        except RequestRejected as error:
            async for frame in _error_frames(str(error), error.status):
                yield frame
            return
        yield "data: [DONE]\n\n"

    async def abort(self, http: Request) -> Response:
        body = await _read(_Abort, http)
        if body.abort_all or body.rid:
            self._engine.abort(None if body.abort_all else body.rid)
        return Response()

    async def pause(self, http: Request) -> Response:
        mode = (await _read(_Pause, http)).mode
        await self._engine.call(partial(self._engine.scheduler.pause, mode))
        return JSONResponse({"message": f"Generation paused ({mode}).", "status": "ok"})

    async def resume(self, http: Request) -> Response:
        await _read(Body, http)
        await self._engine.call(self._engine.scheduler.resume)
        return JSONResponse({"message": "Generation continued.", "status": "ok"})

    async def flush(self, _: Request) -> Response:
        if await self._engine.call(self._engine.scheduler.flush):
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Cache not flushed: requests are running.\n", 400)

    async def update_weights(self, http: Request) -> Response:
        body = await _read(_UpdateFromDisk, http)
        try:
            self._engine.check_place(body.model_path)
            num_kept, is_flushed = await self._engine.update_weights(
                body.model_path,
                body.weight_version,
                flush=body.flush_cache,
                abort_all=body.abort_all_requests,
            )
        except InferenceError as error:
            return _failed(f"Weights not loaded: {error}", num_paused_requests=0)
        if not is_flushed:
            return _failed(_NOT_FLUSHED, num_paused_requests=0)
        return _succeeded("Weights were updated.", num_paused_requests=num_kept)

    async def update_label(self, http: Request) -> Response:
        body = await _read(_Label, http)
        await self._engine.update_label(body.new_version, abort_all=body.abort_all_requests)
        return _succeeded("Version was updated.", new_version=body.new_version)

    async def release_memory(self, http: Request) -> Response:
        tags = (await _read(_Memory, http)).tags
        return await self._null_after(partial(self._engine.scheduler.release_memory, tags))

    async def resume_memory(self, http: Request) -> Response:
        tags = (await _read(_Memory, http)).tags
        return await self._null_after(partial(self._engine.scheduler.memory.resume, tags))

    async def _null_after(self, change: Callable[[], None]) -> Response:
        """Answer a memory request; SGLang returns null on success."""
        try:
            await self._engine.call(change)
        except InferenceError as error:
            raise InvalidRequest(str(error)) from error
        return JSONResponse(None)

    async def load_adapter(self, http: Request) -> Response:
        body = await _read(_AdapterSource, http)
        return await self._adapters_after(self._engine.load_adapter(body.lora_name, body.lora_path))

    async def unload_adapter(self, http: Request) -> Response:
        name = (await _read(_AdapterName, http)).lora_name
        return await self._adapters_after(self._engine.unload_adapter(name))

    async def _adapters_after(self, change: Awaitable[None]) -> Response:
        error_message = None
        try:
            await change
        except InferenceError as error:
            error_message = str(error)
        loaded = {name: adapter.path for name, adapter in self._engine.adapters.items()}
        body = {
            "success": error_message is None,
            "error_message": error_message,
            "loaded_adapters": loaded,
        }
        return JSONResponse(body, 200 if error_message is None else 400)

    async def begin_update(self, http: Request) -> Response:
        await _read(_OpenUpdate, http)
        return self._switch_update(opens=True)

    async def end_update(self, http: Request) -> Response:
        await _read(Body, http)
        return self._switch_update(opens=False)

    def _switch_update(self, *, opens: bool) -> Response:
        if opens == self._is_update_open:
            return _failed("a weight update is open" if opens else "no weight update is open")
        self._is_update_open = opens
        return _succeeded("ok")

    async def join_group(self, http: Request) -> Response:
        body = await _read(_JoinGroup, http)
        if body.backend != "gloo":
            return _failed(f"the embedded engine receives weights over gloo, not {body.backend}")
        assignment = RankAssignment(
            host=body.master_address,
            port=body.master_port,
            rank=body.rank_offset,
            world_size=body.world_size,
        )
        try:
            await self._engine.broadcasts.join(body.group_name, assignment)
        except InferenceError as error:
            return _failed(str(error))
        return _succeeded("The group was formed.")

    async def leave_group(self, http: Request) -> Response:
        name = (await _read(_Group, http)).group_name
        if not self._engine.broadcasts.leave(name):
            return _failed(f"unknown group {name}")
        return _succeeded("The group was left.")

    async def update_from_group(self, http: Request) -> Response:
        body = await _read(_UpdateFromGroup, http)
        if body.load_format is not None:
            return _failed(f"the engine takes tensors one by one, not as {body.load_format}")
        if not self._is_update_open:
            return _failed("weights arrive only between begin_weight_update and end_weight_update")
        try:
            is_flushed = await self._engine.update_weights_from_group(
                WeightManifest(body.group_name, body.names, body.dtypes, body.shapes),
                body.weight_version,
                flush=body.flush_cache,
                abort_all=body.abort_all_requests,
            )
        except InferenceError as error:
            return _failed(str(error))
        return _succeeded("Weights were updated.") if is_flushed else _failed(_NOT_FLUSHED)


async def _read(kind: type[_AnyBody], http: Request) -> _AnyBody:
    """Return the body of a control route."""
    return read_body(kind, await read_json_object(http, _MAX_CONTROL_BYTES))


def _succeeded(message: str, **details: object) -> Response:
    return JSONResponse({"success": True, "message": message, **details})


def _failed(message: str, **details: object) -> Response:
    return JSONResponse({"success": False, "message": message, **details}, 400)


def _event_stream(frames: AsyncIterator[str]) -> Response:
    return StreamingResponse(frames, media_type="text/event-stream")


async def _error_frames(message: str, status: int) -> AsyncIterator[str]:
    """Yield server-sent events that report an error and end the stream."""
    error = {
        "message": message,
        "type": "invalid_request_error",
        "code": status,
        "retryable": False,
    }
    yield f"data: {json.dumps({'error': error})}\n\n"
    yield "data: [DONE]\n\n"
