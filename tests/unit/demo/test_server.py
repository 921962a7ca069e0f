import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.processes import listening_process
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.types import CallToolResult, TextContent

from examples.shop.server import CATALOGUE, TOOLS, ToolInputError, call_tool

ROOT = Path(__file__).resolve().parents[3]
SERVER = ROOT / "examples" / "shop" / "server.py"


def text_of(result: CallToolResult) -> str:
    (block,) = result.content
    assert isinstance(block, TextContent)
    return block.text


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening_process([sys.executable, SERVER, "--port", "{port}"]) as address:
        yield f"{address}/mcp"


async def test_tools_are_listed_over_http_with_their_schemas(url: str) -> None:
    async with Client(url) as client:
        listed = (await client.list_tools()).tools
    assert [tool.name for tool in listed] == ["price", "stock", "add", "subtract", "multiply"]
    assert listed[0].input_schema == {
        "type": "object",
        "properties": {"item": {"type": "string"}},
        "required": ["item"],
    }


async def test_a_price_found_over_http_can_be_computed_with(url: str) -> None:
    async with Client(url) as client:
        price = text_of(await client.call_tool("price", {"item": "rice"}))
        total = await client.call_tool("multiply", {"a": int(price), "b": 3})
    assert price == str(CATALOGUE["rice"]["price"])
    assert not total.is_error
    assert text_of(total) == str(3 * int(price))


@pytest.mark.parametrize(
    ("tool", "arguments", "complaint"),
    [
        ("price", {"item": "unicorn"}, "unknown item"),
        ("stock", {"item": 3}, "must be a string"),
        ("price", {}, "takes exactly"),
        ("add", {"a": 1}, "takes exactly"),
        ("add", {"a": 1, "b": 2, "c": 3}, "takes exactly"),
        ("add", {"a": "1", "b": 2}, "must be an integer"),
        ("add", {"a": True, "b": 2}, "must be an integer"),
        ("multiply", {"a": 10**13, "b": 2}, "too large"),
        ("steal", {"item": "rice"}, "unknown tool"),
    ],
)
async def test_a_mistake_is_an_error_result_and_the_session_goes_on(
    url: str, tool: str, arguments: dict[str, object], complaint: str
) -> None:
    async with Client(url) as client:
        wrong = await client.call_tool(tool, arguments)
        right = await client.call_tool("add", {"a": 1, "b": 2})
    assert wrong.is_error
    assert complaint in text_of(wrong)
    assert text_of(right) == "3"


async def test_many_calls_at_once_get_their_own_results(url: str) -> None:
    async with Client(url) as client:
        results = await asyncio.gather(
            *(client.call_tool("subtract", {"a": number, "b": 1}) for number in range(40))
        )
    assert [text_of(result) for result in results] == [str(number - 1) for number in range(40)]


async def test_the_same_tools_answer_over_stdio() -> None:
    parameters = StdioServerParameters(command=sys.executable, args=[str(SERVER), "--stdio"])
    async with Client(stdio_client(parameters)) as client:
        assert len((await client.list_tools()).tools) == len(TOOLS)
        stock = await client.call_tool("stock", {"item": "tea"})
    assert text_of(stock) == str(CATALOGUE["tea"]["stock"])


def test_tools_compute_exactly() -> None:
    assert call_tool({}, "add", {"a": 2, "b": 3}) == "5"
    assert call_tool({}, "subtract", {"a": 2, "b": 3}) == "-1"
    assert call_tool({}, "multiply", {"a": -2, "b": 3}) == "-6"
    with pytest.raises(ToolInputError, match="unknown tool"):
        call_tool({}, "divide", {"a": 2, "b": 3})
