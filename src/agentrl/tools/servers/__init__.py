"""Connections to MCP servers: their settings, transports, limits, requests and failures."""
