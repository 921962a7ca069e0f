"""Fixtures of MCP servers."""

from support.mcp_fixtures import count_file, server_url, shared_count_file, start_server

__all__ = ["count_file", "server_url", "shared_count_file", "start_server"]
