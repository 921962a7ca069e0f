"""A desktop that a model sees and uses: a display, a browser, and a window for people who watch.

`python -m agentrl.tools.desktop` is an MCP server with one display. Behind `agentrl env up` every
client session has a process of it, and thereby a display of its own. `scripts/install_desktop`
installs the programs that it starts. Nothing else of AgentRL imports this.
"""
