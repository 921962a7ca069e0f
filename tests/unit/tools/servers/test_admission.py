import pytest
from mcp.types import Tool

from agentrl.tools.servers.admission import listing_problem


def tool(name: str = "look", **fields: object) -> Tool:
    return Tool.model_validate({"name": name, "inputSchema": {"type": "object"}, **fields})


def test_ordinary_tools_pass() -> None:
    names = ("look", "web.search", "a/b-c_d:1", "suche_größe", "x" * 128)
    assert listing_problem([tool(name) for name in names]) is None


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ([tool()] * 2_001, "lists more than 2000 tools"),
        ([tool("a\nb")], r"lists a tool named 'a\nb': names have"),
        ([tool("\x1b[2Jx")], r"lists a tool named '\x1b[2Jx': names have"),
        ([tool("")], "lists a tool named '': names have"),
        ([tool("x" * 10**6)], f"lists a tool named '{'x' * 80}': names have"),
        ([tool(description="d" * 10**6)], "describes 'look' in more than 50000 characters"),
        ([tool(inputSchema={"a": "s" * 10**6})], "has a schema of 'look' of more than 500000"),
    ],
)
def test_a_listing_that_cannot_be_offered_is_named_in_one_line(
    tools: list[Tool], problem: str
) -> None:
    said = listing_problem(tools)
    assert said is not None
    assert said.startswith(problem)
    assert said.isprintable()
    assert len(said) < 250
