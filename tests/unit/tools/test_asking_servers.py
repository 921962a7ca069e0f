"""What servers ask of their client, with a real server, in both generations of the protocol."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.processes import listening_process

from agentrl.tools import McpToolBox, ToolsConfig, connect_tools
from agentrl.tools.servers.admission import MAX_TOOLS

NUM_REGROWN = 900

SERVER = Path(__file__).with_name("asking_server.py")
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
async def test_a_user_a_model_and_roots_are_not_to_be_had(
    config_for: ConfigFor, servers: Servers, per_rollout: bool
) -> None:
    config = config_for(servers(per_rollout=per_rollout))
    async with connect_tools(config) as box, box.for_rollout() as mine:
        for name in ("order", "think", "find"):
            result = await mine.call(name, {})
            assert result.is_error
            assert "Error" in result.content
        assert not (await mine.call("report", {})).is_error


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
