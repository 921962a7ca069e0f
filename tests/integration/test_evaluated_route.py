"""`agentrl eval --evaluated_route`: a model behind somebody else's chat API, on the demo's tools.

The model is a script: no such API is reachable from a test. Everything else is real.
"""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from support.demo_run import ROOT

from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

KEY = "sk-of-somebody"
QUESTIONS = [
    {"id": "price", "query": "rice: price?", "answer": "22", "scorer": "exact"},
    {"id": "wrong", "query": "rice: price?", "answer": "23", "scorer": "exact"},
]


@contextmanager
def chat_api() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server with a model that looks a price up and repeats it, and what it was asked."""
    asked: list[dict[str, Any]] = []

    async def complete(request: Request) -> Response:
        body = await request.json()
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "Incorrect API key provided"}}, 401)
        asked.append(body)
        last = body["messages"][-1]
        message: dict[str, Any] = {"role": "assistant", "content": "OK"}
        if last["role"] == "tool":
            message["content"] = f"<think>easy</think><answer>{last['content']}</answer>"
        elif "tools" in body:
            function = {"name": "price", "arguments": json.dumps({"item": "rice"})}
            call = {"id": "call_1", "type": "function", "function": function}
            message |= {"content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({"choices": [choice], "usage": {"prompt_tokens": 3}})

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1", asked
        finally:
            server.should_exit = True
            thread.join()


def evaluate(folder: Path, url: str, key: str) -> subprocess.CompletedProcess[str]:
    (folder / "eval.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in QUESTIONS))
    route = {"base_url": url, "model": "somebody/large", "api_key_env": "SOMEBODY_KEY"}
    values: dict[str, object] = {
        "eval_file": folder / "eval.jsonl",
        "tool_server_command": f"{sys.executable} {ROOT}/examples/shop/server.py --port {{port}}",
        "evaluated_route": json.dumps(route),
        "output_dir": folder / "output",
        "logs_dir": folder / "logs",
        "mongo_data_dir": folder / "mongo",
        "mongo_port": 0,
    }
    command = [str(Path(sys.executable).parent / "agentrl"), "eval", "--run_name", "other"]
    command += [str(word) for name, value in values.items() for word in (f"--{name}", value)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "SOMEBODY_KEY": key}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=200, env=environment
    )


async def test_any_chat_model_is_scored_with_the_tools(tmp_path: Path) -> None:
    with chat_api() as (url, asked):
        done = evaluate(tmp_path, url, KEY)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "output/eval.json").read_text())
    assert (result["model"], result["num_unscored"]) == ("somebody/large", 0)
    assert result["reward_mean"] == 0.5
    assert {body["model"] for body in asked} == {"somebody/large"}
    final = asked[-1]["messages"]
    assert [message["role"] for message in final] == ["user", "assistant", "tool"]
    assert final[1]["tool_calls"][0]["function"]["arguments"] == '{"item": "rice"}'
    assert asked[-1]["temperature"] == 0.0
    with EmbeddedMongo(tmp_path / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri("other-eval")) as store:
            records = [record async for record in store.records.find()]
            turns = await store.turns.get_many(records[0].turns)
    assert [record.final_answer for record in records] == ["22", "22"]
    assert [turn.parent for turn in turns] == [None, 0]
    assert {turn.model for turn in turns} == {"somebody/large"}
    assert not any(turn.trainable for turn in turns)
    assert turns[0].tool_results[0].content == "22"
    assert not list((tmp_path / "logs").glob("*serve*"))


def test_a_wrong_key_is_named_before_anything_starts(tmp_path: Path) -> None:
    with chat_api() as (url, asked):
        done = evaluate(tmp_path, url, "sk-wrong")
    assert done.returncode != 0
    assert not asked
    assert (
        "--evaluated_route somebody/large: Incorrect API key provided" in done.stderr + done.stdout
    )
    assert "sk-wrong" not in done.stdout + done.stderr
    assert not (tmp_path / "output").exists()
