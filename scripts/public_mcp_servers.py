"""The servers that `mcp_servers.py` tests: how each is started and called."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Registry = Literal["PyPI", "npm", "ours"]


@dataclass(frozen=True)
class PublicServer:
    """A server, its command, and two calls to it.

    In its words, `{dir}` is a new folder with a repository, `{port}` a free port, `{page}` the address of
    a page, `{cache}` where servers are installed, and `{root}` this checkout.
    """

    name: str
    package: str
    registry: Registry
    call: tuple[str, Mapping[str, Any]]
    """A tool, and valid arguments."""
    expected: str
    """A pattern that the result of the call must match."""
    wrong: tuple[str, Mapping[str, Any]]
    """A call that the server refuses."""
    args: tuple[str, ...] | None = ()
    """Arguments for stdio, if it supports it."""
    http_args: tuple[str, ...] | None = None
    """Arguments for HTTP, if it supports it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""
    beside: tuple[str, ...] | None = None
    """Further requirements of a server from PyPI that needs its own environment."""
    first: tuple[str, Mapping[str, Any]] | None = None
    """A call that must precede the others."""
    source: str = ""
    """A program for the interpreter, as `{dir}/server`, if the package is a server library."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers that it requires over HTTP."""


def _app(
    name: str,
    call: str,
    expected: str,
    good: Mapping[str, Any] | None = None,
    wrong: Mapping[str, Any] | None = None,
) -> PublicServer:
    """Return one of the example servers of MCP Apps; tools without arguments have no wrong call."""
    return PublicServer(
        name=name,
        package=f"@modelcontextprotocol/{name}@2.0.3",
        registry="npm",
        call=(call, good or {}),
        expected=expected,
        wrong=("no-such-tool", {}) if wrong is None else (call, wrong),
        args=("--stdio",),
        http_args=(),
        environment={"PORT": "{port}"},
    )


TOKEN = "of-this-machine"
_CALLS = """
@server.tool()
def price(item: str) -> str:
    return {"lamp": "The lamp costs 21."}[item]
"""
_PYTHON_SDK = f"""
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")
{_CALLS}
if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
server.run()
"""
_FASTMCP = f"""
import sys
from fastmcp import FastMCP

server = FastMCP("shop")
{_CALLS}
if sys.argv[1:]:
    server.run("http", port=int(sys.argv[1]), show_banner=False)
server.run(show_banner=False)
"""


def _library_server(name: str, package: str, source: str) -> PublicServer:
    """Return a server built with a library, in its own environment."""
    return PublicServer(
        name=name,
        package=package,
        registry="PyPI",
        call=("price", {"item": "lamp"}),
        expected="The lamp costs 21.",
        wrong=("price", {"item": "rug"}),
        args=("{dir}/server",),
        http_args=("{dir}/server", "{port}"),
        beside=(),
        source=source,
    )


TIME = PublicServer(
    "mcp-server-time",
    "mcp-server-time==2026.10.19",
    "PyPI",
    (
        "convert_time",
        {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Kolkata"},
    ),
    "17:30",
    ("get_current_time", {"timezone": "Nowhere/Land"}),
    args=("--local-timezone=UTC",),
)
SERVERS = (
    TIME,
    PublicServer(
        "mcp-server-fetch",
        "mcp-server-fetch==2026.10.24",
        "PyPI",
        ("fetch", {"url": "{page}"}),
        "The lamp costs 21.",
        ("fetch", {"url": "no address"}),
        # The page is on this machine, from which the server reads only if allowed.
        args=("--ignore-robots-txt", "--allow-private-ips"),
    ),
    PublicServer(
        "mcp-server-git",
        "mcp-server-git==2026.10.19",
        "PyPI",
        ("git_status", {"repo_path": "{dir}"}),
        "branch",
        ("git_status", {"repo_path": "/nowhere"}),
    ),
    PublicServer(
        "mcp-server-sqlite",
        "mcp-server-sqlite==2025.4.25",
        "PyPI",
        ("write_query", {"query": "INSERT INTO lamps VALUES (21)"}),
        r"affected_rows\D+1",
        ("read_query", {"query": "SELEKT 1"}),
        args=("--db-path", "{dir}/notes.db"),
        beside=("mcp<2",),
        first=("create_table", {"query": "CREATE TABLE lamps (price int)"}),
    ),
    PublicServer(
        "mcp-server-everything",
        "@modelcontextprotocol/server-everything@2026.8.31",
        "npm",
        ("echo", {"message": "hällo"}),
        "Echo: hällo",
        ("echo", {}),
        http_args=("streamableHttp",),
        environment={"PORT": "{port}"},
    ),
    PublicServer(
        "mcp-server-filesystem",
        "@modelcontextprotocol/server-filesystem@2026.8.31",
        "npm",
        ("write_file", {"path": "{dir}/note.txt", "content": "21"}),
        "note.txt",
        ("read_text_file", {"path": "/etc/hostname"}),
        args=("{dir}",),
    ),
    PublicServer(
        "mcp-server-memory",
        "@modelcontextprotocol/server-memory@2026.8.31",
        "npm",
        (
            "create_entities",
            {"entities": [{"name": "lamp", "entityType": "thing", "observations": ["costs 21"]}]},
        ),
        "costs 21",
        ("create_entities", {"entities": "lamp"}),
        environment={"MEMORY_FILE_PATH": "{dir}/memory.json"},
    ),
    PublicServer(
        "mcp-server-sequential-thinking",
        "@modelcontextprotocol/server-sequential-thinking@2026.8.31",
        "npm",
        (
            "sequentialthinking",
            {"thought": "a", "thoughtNumber": 1, "totalThoughts": 1, "nextThoughtNeeded": False},
        ),
        "thoughtNumber",
        ("sequentialthinking", {"thought": 7}),
    ),
    _app("server-basic-vanillajs", "get-time", r"20\d\d-\d\d-\d\dT\d\d:\d\d"),
    _app("server-budget-allocator", "get-budget-data", r"Default Budget: \$100,000"),
    _app(
        "server-cohort-heatmap",
        "get-cohort-data",
        "3 cohorts",
        {"cohortCount": 3},
        {"cohortCount": "many"},
    ),
    _app(
        "server-scenario-modeler",
        "get-scenario-data",
        "Bootstrapped Growth",
        wrong={"customInputs": 7},
    ),
    _app(
        "server-customer-segmentation",
        "get-customer-data",
        '"segment": ?"Enterprise"',
        {"segment": "Enterprise"},
        {"segment": "nobody"},
    ),
    _app("server-system-monitor", "get-system-info", r'"totalBytes": ?\d{6,}'),
    _library_server("MCPServer, of the Python SDK", "mcp==2.3.0", _PYTHON_SDK),
    _library_server("FastMCP", "fastmcp==4.0.11", _FASTMCP),
    PublicServer(
        "`agentrl env up` with mcp-server-time",
        "",
        "ours",
        TIME.call,
        TIME.expected,
        TIME.wrong,
        args=None,
        http_args=(
            *("-m", "agentrl", "env", "up", "--port", "{port}", "--mcp_servers"),
            json.dumps({"mcpServers": {"time": {"command": "{cache}/pypi/bin/mcp-server-time"}}}),
        ),
        environment={"MCP_SERVER_TOKEN": TOKEN},
        headers={"Authorization": f"Bearer {TOKEN}", "agentrl-client": "the-table-of-servers"},
    ),
    PublicServer(
        "examples/shop/server.py",
        "",
        "ours",
        ("add", {"a": 20, "b": 22}),
        "^42$",
        ("add", {"a": 20, "b": "x"}),
        args=("{root}/examples/shop/server.py", "--stdio"),
        http_args=("{root}/examples/shop/server.py", "--port", "{port}"),
    ),
)
