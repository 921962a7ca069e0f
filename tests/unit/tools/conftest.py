"""Fixtures of MCP servers."""

from support.mcp_fixtures import (
    config_for,
    count_file,
    server_url,
    shared_count_file,
    start_server,
    stdio_server,
)

__all__ = [
    "config_for",
    "count_file",
    "server_url",
    "shared_count_file",
    "start_server",
    "stdio_server",
]
