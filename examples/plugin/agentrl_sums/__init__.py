"""An AgentRL plugin: sums as training tasks (docs/plugins.md)."""

from agentrl.plugin_registry import Plugin, PluginCommand

PLUGIN = Plugin(
    commands={"sums": PluginCommand("agentrl_sums.command:sums", "print generated sums")},
    task_sources={"sums": "agentrl_sums.source:SUMS"},
)
