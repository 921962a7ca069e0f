import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl.rewards import AgentConfig

Answer = str | int | float | bytes | None
"""What a judge does: says text, fails with a status, is silent for seconds, sends a body as it is, or
returns rubbish."""


@dataclass
class JudgeServer:
    """An OpenAI-compatible endpoint whose models answer from a script, the last line for ever."""

    scripts: dict[str, list[Answer]]
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    url: str = ""

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("authorization", ""))
        script = self.scripts[body["model"]]
        answer = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            answer = "Correct"
        if isinstance(answer, int):
            return JSONResponse({"error": "no"}, status_code=answer)
        if isinstance(answer, bytes):
            encoding = {"Content-Encoding": "gzip"} if answer.startswith(_GZIP) else {}
            return Response(answer, headers=encoding, media_type="application/json")
        if answer is None:
            return Response("<html>", media_type="text/html")
        message = {"role": "assistant", "content": answer}
        return JSONResponse({"choices": [{"index": 0, "message": message}]})


_GZIP = b"\x1f\x8b"
ServeJudge = Callable[..., Any]


@pytest.fixture
async def judge_server() -> AsyncIterator[JudgeServer]:
    judge = JudgeServer(scripts={})
    app = Starlette(routes=[Route("/v1/chat/completions", judge.complete, methods=["POST"])])
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    judge.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield judge
    server.should_exit = True
    await serving
    listener.close()


@pytest.fixture
def judged_by(judge_server: JudgeServer) -> Callable[..., AgentConfig]:
    """Return a configuration whose judges are the given scripts, in order."""

    def configure(*scripts: list[Answer], **options: object) -> AgentConfig:
        judge_server.scripts = {f"judge-{i}": script for i, script in enumerate(scripts)}
        endpoints = [
            {"base_url": judge_server.url, "model": name, "api_key": "k3y"}
            for name in judge_server.scripts
        ]
        section = {"models": endpoints, "retry_delay": 0.01, "max_retries": 2, **options}
        return AgentConfig.model_validate({"path": "test.yml", "scorer_agent": section})

    return configure
