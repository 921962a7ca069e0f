"""A scripted stand-in for a language model behind a real HTTP server.

It implements the part of SGLang's HTTP API that samplers use (`/generate`), over real sockets, but
a function from the prompt's text to a reply decides what it "samples": tests can run exact
conversations with it. It keeps every request, which tests compare with stored prompts.
"""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.renderers.renderer import Renderer

Script = Callable[[str], str]
STOP = "<|im_end|>"
CONTROL_ROUTES = (
    *("pause_generation", "continue_generation", "flush_cache"),
    *("update_weights_from_disk", "update_weight_version"),
)


@dataclass
class ScriptedEngine:
    """Replies by script.

    Attributes:
        script: prompt text -> reply text. A reply that ends in `<cut>` is stopped by length.
        delay_seconds: how long each generation takes.
        version: weight version that the replies carry.
        down: answer 503 to everything.
        gate: if given, a generation waits until this event is set.
        hold: if given, a stream stops before its last token until this event is set.
        requests: the bodies of all generation requests.
    """

    renderer: Renderer
    script: Script
    delay_seconds: float = 0.0
    version: int = 0
    down: bool = False
    gate: threading.Event | None = None
    hold: threading.Event | None = None
    requests: MutableSequence[dict[str, Any]] = field(default_factory=list)
    base_url: str = ""

    def reply_ids(self, text: str) -> list[int]:
        """Return the ids of a reply as the model would sample them, tags as added tokens."""
        ids: list[int] = self.renderer.sampled_ids(text.removesuffix("<cut>")).tolist()
        stop = [] if text.endswith("<cut>") else list(self.renderer.stop_token_ids[:1])
        return [*ids, *stop]

    async def generate(self, request: Request) -> Response:
        """Answer `/generate`: whole, or as a stream of growing replies."""
        body = await request.json()
        if self.down:
            return JSONResponse({"object": "error", "message": "queue is full"}, 503)
        self.requests.append(body)
        await asyncio.sleep(self.delay_seconds)
        if self.gate is not None:
            assert await asyncio.to_thread(self.gate.wait, 60)
        text = self.script(self.renderer.decode(body["input_ids"]))
        ids = self.reply_ids(text)[: body["sampling_params"]["max_new_tokens"]]
        if body.get("stream"):
            return StreamingResponse(self._frames(body, text, ids), media_type="text/event-stream")
        return JSONResponse(self._answer(body, text, ids))

    async def _frames(self, body: dict[str, Any], text: str, ids: list[int]) -> AsyncIterator[str]:
        for size in range(1, len(ids)):
            part = self._answer(body, "", ids[:size])
            part["meta_info"]["finish_reason"] = None
            yield f"data: {json.dumps(part)}\n\n"
        if self.hold is not None:
            assert await asyncio.to_thread(self.hold.wait, 10)
        yield f"data: {json.dumps(self._answer(body, text, ids))}\n\n"
        yield "data: [DONE]\n\n"

    def _answer(self, body: dict[str, Any], text: str, ids: list[int]) -> dict[str, Any]:
        stopped = bool(ids) and ids[-1] in self.renderer.stop_token_ids
        reason: dict[str, Any] = {"type": "length", "length": len(ids)}
        if stopped:
            reason = {"type": "stop", "matched": ids[-1]}
        version = str(self.version)
        meta = {
            "id": body.get("rid") or "none",
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "num_retractions": 0,
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
            "input_token_logprobs": [],
            "output_token_logprobs": [[-0.5, id_, None] for id_ in ids],
        }
        return {"text": text, "output_ids": ids, "meta_info": meta}

    async def info(self, request: Request) -> Response:
        """Describe the server."""
        body = {"weight_version": str(self.version), "version": "0.5.23", "model_path": "scripted"}
        return JSONResponse(body)

    async def control(self, request: Request) -> Response:
        """Accept pauses and new weights without any effect on the script."""
        body = await request.json() if await request.body() else {}
        version = body.get("weight_version", body.get("new_version"))
        if version is not None:
            self.version = int(version)
        return JSONResponse({"success": True, "message": "scripted"})

    async def loads(self, request: Request) -> Response:
        """Report no load."""
        return JSONResponse({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]})


@contextmanager
def serve_script(renderer: Renderer, script: Script, **options: Any) -> Iterator[ScriptedEngine]:
    """Serve a script on a free port of this machine, from a thread of this process."""
    engine = ScriptedEngine(renderer, script, **options)
    app = Starlette(
        routes=[
            Route("/generate", engine.generate, methods=["POST"]),
            Route("/model_info", engine.info),
            Route("/server_info", engine.info),
            Route("/health", engine.info),
            Route("/v1/loads", engine.loads),
            *(Route(f"/{name}", engine.control, methods=["POST"]) for name in CONTROL_ROUTES),
        ]
    )
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert thread.is_alive(), "the scripted engine ended"
        assert time.monotonic() < deadline, "the scripted engine did not start"
        time.sleep(0.005)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    engine.base_url = f"http://{host}:{port}"
    try:
        yield engine
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def replies(*texts: str) -> Script:
    """A script that gives these replies in order, and repeats the last one forever."""
    asked = itertools.count()
    return lambda prompt: texts[min(next(asked), len(texts) - 1)]
