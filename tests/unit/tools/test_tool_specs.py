import asyncio
import json
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.types import Tool
from pydantic import SecretStr

from agentrl.errors import ConfigError
from agentrl.tools import McpServer, ToolsConfig
from agentrl.tools.tool_specs import check_filters, select_tools, unique_names


def tool(name: str) -> Tool:
    return Tool(name=name, input_schema={"type": "object"})


def config(**filters: object) -> ToolsConfig:
    server = McpServer(transport="http", url="http://x", headers={"a": SecretStr("b")})
    return ToolsConfig.model_validate({"servers": {"a": server}, **filters})


@pytest.mark.parametrize(
    ("tools", "names"),
    [
        ([("a", "x"), ("b", "y")], ["x", "y"]),
        ([("a", "x"), ("b", "x"), ("b", "y")], ["a.x", "b.x", "y"]),
        ([("a", "x"), ("b", "x"), ("c", "a.x")], ["a.x", "b.x", "c.a.x"]),
        (
            [("a", "b.x"), ("a.b", "x"), ("c", "x"), ("c", "b.x")],
            ["a.b.x", "a.b.x_2", "c.x", "c.b.x"],
        ),
        ([("my shop", "x"), ("my/shop", "x")], ["my_shop.x", "my_shop.x_2"]),
    ],
)
def test_every_tool_has_a_name_that_no_other_has(
    tools: list[tuple[str, str]], names: list[str]
) -> None:
    assert unique_names(tools) == names


def test_filters_take_every_name_of_a_tool() -> None:
    listed = {"my shop": [tool("buy"), tool("sell")], "b": [tool("buy"), tool("buy")]}
    for name in ("my shop.buy", "my_shop.buy"):
        shown = select_tools(listed, config(tool_names=[name]))
        assert [(spec.name, spec.server) for spec in shown] == [("my_shop.buy", "my shop")]
    hidden = select_tools(listed, config(blocked_tools=["buy"]))
    assert [spec.name for spec in hidden] == ["sell"]
    assert hidden[0].parameters == {"type": "object", "properties": {}}
    with pytest.raises(
        ConfigError, match=r"no MCP server offers the tool 'rent' \(available: my_shop"
    ):
        check_filters(listed, config(blocked_tools=["rent"]))


def test_titles_that_repeat_a_name_are_not_shown() -> None:
    def close_issue(issue_id: int, title: str, labels: list[dict[str, str]] | None = None) -> None:
        """Close it."""

    server = MCPServer("tracker")
    server.tool()(close_issue)
    [listed] = asyncio.run(server.list_tools())
    assert listed.input_schema["properties"]["issue_id"]["title"] == "Issue Id"
    [spec] = select_tools({"a": [listed]}, config())
    assert "Issue Id" not in json.dumps(spec.parameters)
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "issue_id": {"type": "integer"},
            "title": {"type": "string"},
            "labels": {
                "anyOf": [
                    {
                        "type": "array",
                        "items": {"type": "object", "additionalProperties": {"type": "string"}},
                    },
                    {"type": "null"},
                ],
                "default": None,
            },
        },
        "required": ["issue_id", "title"],
    }


def test_titles_that_say_something_are_shown_however_deep_a_schema_is() -> None:
    deep: dict[str, Any] = {"title": "X"}
    for _ in range(800):
        deep = {"items": deep}
    schema = {"title": "What a buyer wants", "properties": {"x": {"title": "Price in euro"} | deep}}
    [spec] = select_tools({"a": [Tool(name="buy", input_schema=schema)]}, config())
    assert spec.parameters == schema
