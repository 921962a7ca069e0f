"""Servers as they are found: they print, say what is no JSON, and change their tools."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.patience import PATIENCE

from agentrl.errors import ToolError
from agentrl.tools import ToolsConfig, connect_tools
from agentrl.tools.servers.admission import describe
from agentrl.tools.servers.result_content import _warn_once

SERVER = str(Path(__file__).parent / "odd_server.py")
ConfigFor = Callable[..., ToolsConfig]


@pytest.fixture
def odd_pipe() -> dict[str, object]:
    return {"command": sys.executable, "args": [SERVER]}


@contextmanager
def served(kind: str) -> Iterator[str]:
    with subprocess.Popen([sys.executable, SERVER, kind], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


@pytest.fixture(params=["json", "sse"])
def odd_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with served(request.param) as url:
        yield url


async def test_over_pipes_odd_answers_cost_one_call_at_most(
    odd_pipe: dict[str, object], config_for: ConfigFor, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_once.cache_clear()  # an earlier test may have listed this server's tools
    async with connect_tools(config_for({"odd": odd_pipe}, call_timeout_seconds=PATIENCE)) as box:
        names = {spec.name for spec in box.specs}
        assert (len(names), "shapeless" in names) == (len(box.specs), False)
        for name in ("chatter", "asks"):
            result = await box.call(name, {})
            assert (result.content, result.is_error) == ("ok", False)
        for name, content in (
            ("mixed", "ok\n[1 malformed part, not shown]"),
            ("bare", '{"a": 1}'),
            ("plain", "ok"),
            ("listed", "[1, 2]"),
        ):
            result = await box.call(name, {})
            assert (result.content, result.is_error) == (content, False)
        for name, reason in (
            ("half", "hex escape"),
            ("null", "is not a JSON-RPC message"),
            ("garbage", "EOF"),
            ("deep", "recursion"),
        ):
            with pytest.raises(ToolError, match=r"'odd' at .* sent an invalid response") as failed:
                await box.call(name, {})
            assert reason in str(failed.value)
            assert str(failed.value).isprintable()
        for name, code in (("own_closed", -32000), ("own_timeout", -32001)):
            result = await box.call(name, {})
            assert result.is_error
            # Neither the end of the connection nor the timeout of calls.
            assert result.content == f"Error: no tools/call: code {code}"
    said, left_out = [record.getMessage() for record in caplog.records]
    assert "leaving out the malformed tool 'shapeless': tools.0.inputSchema.type" in left_out
    assert "ignoring output that is not an MCP message: 'odd server, version 1'" in said


async def test_over_http_odd_answers_cost_one_call_at_most(
    odd_url: str, config_for: ConfigFor
) -> None:
    async with connect_tools(config_for(odd_url, max_result_chars=100)) as box:
        for name in ("half", "null", "deep"):
            with pytest.raises(ToolError, match="sent an invalid response"):
                await box.call(name, {})
        with pytest.raises(
            ToolError, match=("lost the connection during a call: answered with text/html")
        ):
            await box.call("html", {})
        assert (await box.call("own_closed", {})).content == "Error: no tools/call: code -32000"


async def test_over_one_stream_for_all_an_answer_that_is_no_message_ends_the_connection(
    config_for: ConfigFor, caplog: pytest.LogCaptureFixture
) -> None:
    with served("old_sse") as url:
        config = config_for({"odd": {"type": "sse", "url": url}}, call_timeout_seconds=PATIENCE)
        async with connect_tools(config) as box:
            for name in ("half", "null"):
                with pytest.raises(
                    ToolError, match=r"'odd' at .* lost the connection during a call"
                ):
                    await box.call(name, {})
                assert f"{url} sent what is not an MCP message" in caplog.text
                caplog.clear()
            assert (await box.call("first", {})).content == "ok"


async def test_answers_of_too_many_values_are_observations(
    odd_url: str, odd_pipe: dict[str, object], config_for: ConfigFor
) -> None:
    for server in (odd_url, {"odd": odd_pipe}):
        async with connect_tools(config_for(server)) as box:
            result = await box.call("dense", {})
            assert result.is_error
            assert result.content == (
                "Error: the tool's result is invalid: the response contains more than 300000 commas "
                "and brackets"
            )
            assert (await box.call("asks", {})).content == "ok"


async def test_a_compressed_answer_is_refused(odd_url: str, config_for: ConfigFor) -> None:
    async with connect_tools(config_for(odd_url)) as box:
        result = await box.call("gzip", {})
        assert (result.is_error, "is compressed (gzip)" in result.content) == (True, True)


async def test_a_server_with_a_tool_that_cannot_be_named_is_refused_in_one_line(
    odd_pipe: dict[str, object], config_for: ConfigFor
) -> None:
    config = config_for({"odd": {**odd_pipe, "env": {"ODD_TOOL": "a\n\x1b[2Jb"}}})
    with pytest.raises(ToolError, match=r"'odd' at .* lists a tool named 'a\\n") as failed:
        async with connect_tools(config):
            pass
    assert str(failed.value).isprintable()


async def test_a_server_that_lists_pages_for_ever_is_refused(
    odd_pipe: dict[str, object], config_for: ConfigFor
) -> None:
    with pytest.raises(ToolError, match="lists more than 2000 tools"):
        async with connect_tools(config_for({"odd": {**odd_pipe, "env": {"ODD_PAGES": "1"}}})):
            pass


@pytest.mark.slow
async def test_a_result_of_many_megabytes_is_an_observation(
    odd_url: str, config_for: ConfigFor
) -> None:
    async with connect_tools(config_for(odd_url)) as box:
        result = await box.call("huge", {})
        assert result.is_error
        assert "32 MiB" in result.content or "33554432 byte" in result.content
        assert (await box.call("asks", {})).content == "ok"


async def test_tools_that_a_server_adds_are_shown_to_the_next_rollouts(
    odd_pipe: dict[str, object], config_for: ConfigFor, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        connect_tools(config_for({"odd": odd_pipe}, refresh_seconds=0.05)) as box,
        box.for_rollout() as begun,
    ):
        before = begun.specs
        await begun.call("grow", {})
        async with asyncio.timeout(PATIENCE):
            while "the tools have changed" not in caplog.text:
                await begun.call("chatter", {})
        assert begun.specs == before
        assert (await begun.call("first", {})).content == "ok"
        async with box.for_rollout() as later:
            names = {spec.name for spec in later.specs}
            assert names - {spec.name for spec in before} == {"grown"}
            assert "first" not in names
            assert "there is no tool named 'first'" in (await later.call("first", {})).content


def test_errors_are_described_in_a_short_line_that_terminals_do_not_act_upon() -> None:
    said = describe(ValueError("\x1b[2J gone\n" + "x" * 10_000))
    assert said.startswith("ValueError: \\x1b[2J gone xxx")
    assert len(said) < 600
