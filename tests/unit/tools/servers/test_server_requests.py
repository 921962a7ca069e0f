"""What servers ask of their client, with a real server, in both generations of the protocol."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.processes import listening_process
from mcp.types import ElicitRequestFormParams, ElicitResult

from agentrl.tools import McpToolBox, ToolsConfig, connect_tools
from agentrl.tools.servers.admission import MAX_TOOLS
from agentrl.tools.servers.server_config import McpServer
from agentrl.tools.servers.server_requests import ServerQuestions

NUM_REGROWN = 900

SERVER = Path(__file__).parents[1] / "asking_server.py"
ConfigFor = Callable[..., ToolsConfig]
Servers = Callable[..., dict[str, object]]
GENERATIONS = pytest.mark.parametrize("per_rollout", [False, True], ids=["2026", "2025"])


@pytest.fixture(scope="module")
def shop_url() -> Iterator[str]:
    """One server for all tests."""
    with listening_process([sys.executable, SERVER, "{port}"]) as url:
        yield f"{url}/mcp"


@pytest.fixture
def servers(shop_url: str) -> Servers:
    # A server that keeps state in the session is spoken to as the older protocol has it.
    return lambda **fields: {"shop": {"url": shop_url, **fields}}


async def text(box: McpToolBox, name: str) -> str:
    return (await box.call(name, {})).content


@GENERATIONS
async def test_questions_to_a_user_are_declined_and_said_once(
    config_for: ConfigFor, servers: Servers, per_rollout: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_for(servers(per_rollout=per_rollout))
    with caplog.at_level(logging.WARNING):
        async with connect_tools(config) as box, box.for_rollout() as mine:
            assert await text(mine, "order") == "decline"
            assert await text(mine, "order_nothing") == "decline"
    said = [line for line in caplog.messages if "asks the user" in line]
    assert len(said) == 1
    assert "MCP server 'shop' asks the user 'Which color?': declined" in said[0]


@GENERATIONS
async def test_the_policy_may_accept_a_forms_defaults(
    config_for: ConfigFor, servers: Servers, per_rollout: bool
) -> None:
    config = config_for(servers(per_rollout=per_rollout, elicitation="accept"))
    async with connect_tools(config) as box, box.for_rollout() as mine:
        assert await text(mine, "order") == "color='red'"
        assert await text(mine, "order_nothing") == "decline"


@pytest.mark.parametrize("required", [5, "n", [["n"]], [{}], {"n": 1}, None], ids=repr)
async def test_a_form_that_makes_no_sense_is_declined(required: object) -> None:
    server = McpServer(transport="stdio", command="shop", elicitation="accept")
    form = {"type": "object", "properties": {"n": {"default": 1}}, "required": required}
    asked = ElicitRequestFormParams(message="?", requested_schema=form)
    assert await ServerQuestions("shop", server).answer(None, asked) == ElicitResult(
        action="decline"
    )


@GENERATIONS
async def test_a_model_and_roots_are_refused_and_said_once_a_server(
    config_for: ConfigFor, servers: Servers, per_rollout: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect_tools(config_for(servers(per_rollout=per_rollout))) as box:
        for _ in range(2):
            async with box.for_rollout() as mine:
                for name in ("think", "find"):
                    assert (await mine.call(name, {})).is_error
    said = [line for line in caplog.messages if "(logged once)" in line]
    assert [line.partition(": ")[0] for line in said] == [
        "MCP server 'shop' requests a language model (sampling)",
        "MCP server 'shop' requests roots (roots)",
    ]


async def test_a_call_that_becomes_a_task_is_polled_to_its_end(
    config_for: ConfigFor, servers: Servers
) -> None:
    config = config_for(servers(), call_timeout_seconds=0.7, max_call_seconds=30.0)
    async with connect_tools(config) as box:
        # More than a second, although a call may take 0.7: the task says that it goes on.
        assert await text(box, "work") == "fired"
        failed = await box.call("work_badly", {})
    assert failed.is_error
    assert failed.content == "Error: the kiln broke"


async def test_what_a_task_asks_is_answered_as_a_call_is(
    config_for: ConfigFor, servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect_tools(config_for(servers())) as box:
        assert await text(box, "work_asking") == "fired decline"
        thinking = await box.call("work_thinking", {})
        assert "task-" in await text(box, "cancelled")
    assert (thinking.is_error, thinking.content) == (True, "Error: Sampling not supported")
    assert "asks the user 'How many?': declined" in caplog.text
    assert "requests a language model (sampling)" in caplog.text


async def test_a_task_that_asks_for_an_endless_pause_is_polled_all_the_same(
    config_for: ConfigFor, servers: Servers
) -> None:
    handle = {"resultType": "task", "taskId": "t", "status": "working", "pollIntervalMs": 10**400}
    state = {"taskId": "t", "status": "completed", "result": {"content": []}}
    async with connect_tools(config_for(servers())) as box:
        done = await box.call("work_as", {"handle": handle, "state": state})
    assert not done.is_error


async def test_a_task_that_never_ends_is_cancelled(config_for: ConfigFor, servers: Servers) -> None:
    config = config_for(servers(), call_timeout_seconds=0.7, max_call_seconds=1.0)
    async with connect_tools(config) as box:
        late = await box.call("work_for_ever", {})
        assert "task-" in await text(box, "cancelled")
    assert late.is_error
    assert "no result within" in late.content


@GENERATIONS
async def test_instructions_links_and_structured_content_reach_the_model(
    config_for: ConfigFor, servers: Servers, per_rollout: bool
) -> None:
    async with connect_tools(config_for(servers(per_rollout=per_rollout))) as box:
        async with box.for_rollout() as mine:
            assert await text(mine, "look_up") == "The lamp costs 21.\n[resource lost: shop://none]"
            assert await text(mine, "report") == '2 lamps\n{"price": 21}'
            assert mine.instructions == (
                "Instructions of the tool server shop:\nPrices are in euro."
            )
        quiet = config_for(servers(), show_instructions=False)
    async with connect_tools(quiet) as box:
        assert box.instructions == ""


@GENERATIONS
async def test_a_tool_that_is_added_during_a_rollout_is_shown_and_can_be_called(
    config_for: ConfigFor, servers: Servers, per_rollout: bool
) -> None:
    config = config_for(servers(per_rollout=per_rollout))
    async with connect_tools(config) as box, box.for_rollout() as mine:
        grown = await text(mine, "grow")
        if "shrink" not in grown:  # the news may come after the result
            await asyncio.sleep(0.2)
            grown = await text(mine, "report")
        assert "New tools can be called from now on" in grown
        assert '"description": "Make it smaller."' in grown
        (name,) = {spec.name for spec in mine.specs} - {spec.name for spec in box.specs}
        assert (await mine.call(name, {"size": 3})).content == "2"


@pytest.mark.slow
async def test_tools_that_are_added_again_and_again_stay_within_bounds(
    config_for: ConfigFor, servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_for(servers(per_rollout=True), max_result_chars=2_000)
    async with connect_tools(config) as box, box.for_rollout() as mine:
        for _ in range(4):
            await mine.call("regrow", {})
            assert len(mine.specs) <= MAX_TOOLS
        assert len(mine.specs) > NUM_REGROWN
        assert len(await text(mine, "no_such_tool")) < 3_000
    assert "keeps adding tools" in caplog.text


async def test_a_question_of_megabytes_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    questions = ServerQuestions("shop", McpServer(transport="stdio", command="shop"))
    form = {"type": "object", "properties": {}}
    asked = ElicitRequestFormParams(message="\x1b" * (20 << 20), requested_schema=form)
    began = time.thread_time()
    await questions.answer(None, asked)
    assert time.thread_time() - began < 1
    assert len(caplog.text) < 2_000
