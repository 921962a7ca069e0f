import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from harness.tiny_tokenizer import write_tokenizer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl.errors import ConfigError, InferenceError
from agentrl.rewards import AgentConfig
from agentrl.rollout.worker.summarizer import PAGE_SEPARATOR, ModelSummarizer

LONG = "A fact. " * 40


@asynccontextmanager
async def open_summarizer(
    tmp_path: Path, scripts: dict[str, list[str | int]], **section: Any
) -> AsyncIterator[tuple[ModelSummarizer, list[dict[str, Any]]]]:
    """A summarizer whose models say (text) or fail with (status) what a script holds for them."""
    asked: list[dict[str, Any]] = []

    async def complete(request: Request) -> Response:
        body = await request.json()
        asked.append(body)
        script = scripts[body["model"]]
        answer = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(answer, int):
            return JSONResponse({"error": "no"}, status_code=answer)
        return JSONResponse({"choices": [{"message": {"role": "assistant", "content": answer}}]})

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    models = "".join(f"\n    - {{base_url: '{url}', model: {name}}}" for name in scripts)
    extra = "".join(f"\n  {key}: {value}" for key, value in section.items())
    path = tmp_path / "agents.yml"
    path.write_text(
        f"browse_agent:\n  models:{models}\n  retry_delay: 0\n  max_retries: 1"
        f"\n  min_prompt_length: 100{extra}\n"
    )
    settings = AgentConfig.load(path).summarizer_settings()
    assert settings is not None
    try:
        async with ModelSummarizer.open(
            settings, write_tokenizer(tmp_path / "tokenizer")
        ) as summarizer:
            yield summarizer, asked
    finally:
        server.should_exit = True
        await serving


async def test_the_next_model_summarises_when_the_first_one_fails(tmp_path: Path) -> None:
    async with open_summarizer(tmp_path, {"one": [500], "two": ["<think>hm</think>Short."]}) as (
        summarizer,
        asked,
    ):
        summary = await summarizer.summarize_result(
            "visit", {"url": "http://a", "goal": "prices"}, LONG
        )
        history = await summarizer.summarize_history("What {transcript}?", "[look]\n7")
    assert summary == "URL: http://a\nSummary:\nShort."
    assert history == "Short."
    assert [body["model"] for body in asked] == ["one", "one", "two"] * 2
    assert "for this purpose: prices" in asked[0]["messages"][0]["content"]
    assert "What {transcript}?" in asked[-1]["messages"][0]["content"]


async def test_pages_are_summarised_one_by_one(tmp_path: Path) -> None:
    async with open_summarizer(tmp_path, {"one": ["Short."]}) as (summarizer, asked):
        summary = await summarizer.summarize_result(
            "web.fetch_url", {"url": ["http://a", "http://b"]}, PAGE_SEPARATOR.join([LONG, "x"])
        )
    assert summary == "URL: http://a\nSummary:\nShort.\n---\nURL: http://b\nSummary:\nShort."
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        ("look", {}, LONG),
        ("visit", {}, "short"),
        ("visit", {"purpose": "the Complete text"}, LONG),
        ("revisit", {}, LONG),
    ],
)
async def test_other_tools_short_texts_and_whole_texts_stay_as_they_are(
    tmp_path: Path, tool: str, arguments: dict[str, Any], text: str
) -> None:
    async with open_summarizer(tmp_path, {"one": ["Short."]}) as (summarizer, asked):
        assert await summarizer.summarize_result(tool, arguments, text) is None
    assert asked == []


async def test_the_off_switch_leaves_results_alone(tmp_path: Path) -> None:
    async with open_summarizer(tmp_path, {"one": ["Short."]}, status="false") as (
        summarizer,
        asked,
    ):
        assert await summarizer.summarize_result("visit", {}, LONG) is None
    assert asked == []


async def test_the_model_reads_no_more_than_the_longest_prompt(tmp_path: Path) -> None:
    async with open_summarizer(tmp_path, {"one": ["Short."]}, max_prompt_length=120) as (
        summarizer,
        asked,
    ):
        await summarizer.summarize_result("visit", {}, "é" * 100 + "END")
    content = asked[0]["messages"][0]["content"]
    assert content.count("é") == 60
    assert "END" not in content


async def test_an_outage_of_all_models_is_an_error_and_no_summary(tmp_path: Path) -> None:
    scripts: dict[str, list[str | int]] = {"one": [503], "two": [401]}
    async with open_summarizer(tmp_path, scripts) as (summarizer, _):
        with pytest.raises(InferenceError, match="one: HTTP 503; two: HTTP 401"):
            await summarizer.summarize_history("q", "t")


async def test_a_mistake_in_the_section_is_named(tmp_path: Path) -> None:
    path = tmp_path / "agents.yml"
    path.write_text("browse_agent:\n  models: []\n")
    with pytest.raises(ConfigError, match="browse_agent: models"):
        AgentConfig.load(path).summarizer_settings()
