"""A desktop for models: a display, a browser, and a viewer for people.

`python -m agentrl.plugins.tool_environments.desktop` is an MCP server with one display. With `agentrl env up`, every
client session has its own process and therefore its own display. `scripts/install_desktop` installs
the required programs. No other part of AgentRL imports this package.
"""
