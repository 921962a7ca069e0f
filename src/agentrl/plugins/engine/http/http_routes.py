"""The HTTP routes: the part of SGLang's that samplers and publishers use.

Deliberate differences: seeds always apply, `/health` never samples, and a request that waits during
a pause can be aborted. Requests that SGLang answers with 500 or that crash it (token ids beyond the
vocabulary) are refused, and so are broadcasts as one flattened bucket. Broadcast weights are
received in place: a failed broadcast leaves the label of no policy.
"""

import hmac
import time
from collections.abc import Awaitable
from typing import Any, cast, get_args

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from agentrl.distributed.broadcast import RankAssignment
from agentrl.errors import InferenceError
from agentrl.inference import openapi
from agentrl.inference.request_bodies import while_connected
from agentrl.inference.wire import PauseMode
from agentrl.plugins.engine.http.frontend import FrontEnd
from agentrl.plugins.engine.http.http_errors import (
    InvalidRequest,
    RequestRejected,
    on_http_exception,
    on_invalid_request,
    on_rejected,
)
from agentrl.plugins.engine.http.request_fields import generate_schema
from agentrl.plugins.engine.http.streaming import (
    answer_frames,
    error_frames,
    event_stream,
    failed,
    json_object,
    json_response,
    one_of,
    required,
    typed,
)
from agentrl.plugins.engine.weights.weight_receiver import WeightManifest
from agentrl.runtime.http.http_guard import HttpGuard

SGLANG_VERSION = "0.5.23"
"""The SGLang release whose API is implemented; clients choose features by it."""
_SELECTORS = ("all", "target", "draft")
_GROUP = "weight_update_group"
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
        "AgentRL engine", [*data, *control], {"/generate": generate_schema()}
    )

    async def describe(_: Request) -> Response:
        return JSONResponse(document)

    app = Starlette(
        routes=[*data, *control, Route(openapi.PATH, describe, methods=get)],
        exception_handlers={
            InvalidRequest: on_invalid_request,
            RequestRejected: on_rejected,
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


class _Routes:
    """Handlers, one method per route."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._engine = front_end
        self._is_update_open = False

    async def health(self, _: Request) -> Response:
        return Response(status_code=200 if self._engine.is_healthy else 503)

    async def ready(self, _: Request) -> Response:
        is_ready = self._engine.requests.is_serving and not self._engine.is_paused
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
        engine = self._engine
        return JSONResponse(
            {
                "version": SGLANG_VERSION,
                "frontend": "agentrl",
                "model_path": engine.model_path,
                "served_model_name": engine.served_model_name,
                "tp_size": 1,
                "dp_size": 1,
                "context_length": engine.limits.context_length,
                "max_total_num_tokens": engine.max_tokens,
                "max_running_requests": engine.config.max_running_requests,
                "incremental_streaming_output": False,
                "enable_memory_saver": True,
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
        adapters = [
            card | {"id": name, "root": adapter.path, "parent": card["id"], "max_model_len": None}
            for name, adapter in engine.adapters.items()
        ]
        return JSONResponse({"object": "list", "data": [card, *adapters]})

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
            "token_usage": load.token_usage,
        }
        return JSONResponse({"timestamp": time.time(), "version": SGLANG_VERSION, "loads": [rank]})

    async def generate(self, http: Request) -> Response:
        body = await json_object(http, self._engine.max_body_bytes)
        try:
            parsed = await self._engine.parse(body)
        except InvalidRequest as error:
            # A client that requested a stream gets errors in the stream.
            if type(error) is not InvalidRequest or body.get("stream") is not True:
                raise
            return event_stream(error_frames(str(error), 400))
        if parsed.stream:
            return event_stream(answer_frames(self._engine.requests, parsed))
        answers = await while_connected(http, self._engine.requests.generate(parsed))
        return json_response(answers if parsed.is_batch else answers[0])

    async def abort(self, http: Request) -> Response:
        body = await json_object(http)
        rid = typed(body, "rid", str, None)
        if typed(body, "abort_all", bool, False):
            self._engine.abort(None)
        elif rid:
            self._engine.abort(rid)
        return Response()

    async def pause(self, http: Request) -> Response:
        mode = one_of(await json_object(http), "mode", get_args(PauseMode))
        await self._engine.pause(cast(PauseMode, mode))
        return JSONResponse({"message": f"Generation paused ({mode}).", "status": "ok"})

    async def resume(self, http: Request) -> Response:
        await json_object(http)
        await self._engine.resume()
        return JSONResponse({"message": "Generation continued.", "status": "ok"})

    async def flush(self, _: Request) -> Response:
        if await self._engine.flush():
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Cache not flushed: requests are running.\n", 400)

    async def update_weights(self, http: Request) -> Response:
        body = await json_object(http)
        path = required(body, "model_path", str)
        one_of(body, "load_format", ("auto",))
        try:
            self._engine.check_place(path)
            num_kept, is_flushed = await self._engine.update_weights(
                path,
                typed(body, "weight_version", str, None),
                flush=typed(body, "flush_cache", bool, True),
                abort_all=typed(body, "abort_all_requests", bool, False),
            )
        except InferenceError as error:
            return failed(f"Weights not loaded: {error}", num_paused_requests=0)
        if not is_flushed:
            return failed(_NOT_FLUSHED, num_paused_requests=0)
        message = "Weights were updated."
        return JSONResponse({"success": True, "message": message, "num_paused_requests": num_kept})

    async def update_label(self, http: Request) -> Response:
        body = await json_object(http)
        label = required(body, "new_version", str)
        abort_all = typed(body, "abort_all_requests", bool, True)
        await self._engine.update_label(label, abort_all=abort_all)
        return JSONResponse(
            {"success": True, "message": "Version was updated.", "new_version": label}
        )

    async def release_memory(self, http: Request) -> Response:
        return await _null_after(self._engine.release_memory(await _tags(http)))

    async def resume_memory(self, http: Request) -> Response:
        return await _null_after(self._engine.resume_memory(await _tags(http)))

    async def load_adapter(self, http: Request) -> Response:
        body = await json_object(http)
        name, path = (typed(body, field, str, None) for field in ("lora_name", "lora_path"))
        if not name or not path:
            raise HTTPException(400, "lora_name and lora_path must be given")
        return await self._adapters_after(self._engine.load_adapter(name, path))

    async def unload_adapter(self, http: Request) -> Response:
        name = typed(await json_object(http), "lora_name", str, None)
        if not name:
            raise HTTPException(400, "lora_name must be given")
        return await self._adapters_after(self._engine.unload_adapter(name))

    async def _adapters_after(self, change: Awaitable[None]) -> Response:
        error_message = None
        try:
            await change
        except InferenceError as error:
            error_message = str(error)
        body = {
            "success": error_message is None,
            "error_message": error_message,
            "loaded_adapters": {
                name: adapter.path for name, adapter in self._engine.adapters.items()
            },
        }
        return JSONResponse(body, 200 if error_message is None else 400)

    async def begin_update(self, http: Request) -> Response:
        one_of(await json_object(http), "selector", _SELECTORS)
        return self._switch_update(opens=True)

    async def end_update(self, http: Request) -> Response:
        await json_object(http)
        return self._switch_update(opens=False)

    async def join_group(self, http: Request) -> Response:
        body = await json_object(http)
        backend = typed(body, "backend", str, "nccl")
        if backend != "gloo":
            return failed(f"the embedded engine receives weights over gloo, not {backend}")
        assignment = RankAssignment(
            host=required(body, "master_address", str),
            port=required(body, "master_port", int),
            rank=required(body, "rank_offset", int),
            world_size=required(body, "world_size", int),
        )
        try:
            await self._engine.broadcasts.join(typed(body, "group_name", str, _GROUP), assignment)
        except InferenceError as error:
            return failed(str(error))
        return JSONResponse({"success": True, "message": "The group was formed."})

    async def leave_group(self, http: Request) -> Response:
        name = typed(await json_object(http), "group_name", str, _GROUP)
        if not self._engine.broadcasts.leave(name):
            return failed(f"unknown group {name}")
        return JSONResponse({"success": True, "message": "The group was left."})

    async def update_from_group(self, http: Request) -> Response:
        body = await json_object(http)
        manifest = WeightManifest(
            group=typed(body, "group_name", str, _GROUP),
            names=required(body, "names", list),
            dtypes=required(body, "dtypes", list),
            shapes=required(body, "shapes", list),
        )
        load_format = typed(body, "load_format", str, None)
        if load_format is not None:
            return failed(f"the embedded engine takes tensors one by one, not as {load_format}")
        if not self._is_update_open:
            return failed(
                "weights are accepted only between begin_weight_update and end_weight_update"
            )
        try:
            is_flushed = await self._engine.update_weights_from_group(
                manifest,
                typed(body, "weight_version", str, None),
                flush=typed(body, "flush_cache", bool, True),
                abort_all=typed(body, "abort_all_requests", bool, False),
            )
        except InferenceError as error:
            return failed(str(error))
        if not is_flushed:
            return failed(_NOT_FLUSHED)
        return JSONResponse({"success": True, "message": "Weights were updated."})

    def _switch_update(self, *, opens: bool) -> Response:
        if opens == self._is_update_open:
            message = "a weight update is open" if opens else "no weight update is open"
            return failed(message)
        self._is_update_open = opens
        return JSONResponse({"success": True, "message": "ok"})


async def _tags(http: Request) -> list[str]:
    """Return the requested parts of the memory; none means all."""
    tags = typed(await json_object(http), "tags", list, [])
    if not all(isinstance(tag, str) for tag in tags):
        raise HTTPException(400, "tags must be a list of strings")
    return list(tags)


async def _null_after(change: Awaitable[None]) -> Response:
    """Answer a memory request; SGLang returns null on success.

    Raises:
        InvalidRequest: it was refused.
    """
    try:
        await change
    except InferenceError as error:
        raise InvalidRequest(str(error)) from error
    return JSONResponse(None)
