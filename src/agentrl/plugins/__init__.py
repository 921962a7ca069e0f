"""AgentRL's own plugins: what a run may want, found by entry point like anybody else's.

`pyproject.toml` registers each description below in the entry point group `agentrl.plugins`
(`agentrl.plugin_registry`). The kernel imports nothing of this package, and runs without it.
"""

from agentrl.plugin_registry import Plugin, PluginCommand

ENGINE = Plugin(servers={"embedded": "agentrl.plugins.engine.embedded_backend:EMBEDDED"})

ENVIRONMENTS = Plugin(
    task_sources={
        kind: f"agentrl.plugins.environments.environment_source:{kind.upper()}"
        for kind in ("reasoning_gym", "textarena", "verifiers", "openenv", "harbor", "bfcl")
    }
)

INSPECTOR = Plugin(
    commands={
        "inspect": PluginCommand(
            "agentrl.plugins.inspector.inspect_commands:inspect",
            "show a run: progress, records turn by turn, failures",
        ),
        "ui": PluginCommand(
            "agentrl.plugins.inspector.inspect_commands:ui",
            "show running and finished runs in a browser",
        ),
        "fork": PluginCommand(
            "agentrl.plugins.inspector.fork_commands:fork",
            "continue a stored record from one of its turns",
        ),
        "diff": PluginCommand(
            "agentrl.plugins.inspector.diff_command:diff",
            "compare two versions decision by decision, without sampling",
        ),
    }
)

INTEGRATIONS = Plugin(
    agent_interpreters={
        "agent_python": "agentrl.plugins.integrations.agent_worker.description:with_agent_elsewhere"
    },
    training_engines={
        "agentrl": "agentrl.plugins.integrations.native_engine:NativeEngine",
        "areal": "agentrl.plugins.integrations.areal.areal_engine:ArealEngine",
        "sft": "agentrl.plugins.integrations.sft_engine:SftEngine",
        "trl": "agentrl.plugins.integrations.trl.trl_engine:TrlEngine",
        "verl": "agentrl.plugins.integrations.verl.verl_engine:VerlEngine",
    },
)

PLANNER = Plugin(
    commands={
        "plan": PluginCommand(
            "agentrl.plugins.planner.plan_command:plan",
            "compute whether the memory of a cluster suffices",
        )
    },
    run_checks={"memory": "agentrl.plugins.planner.memory_plan:planned_memory"},
    gpu_demands={"rehearsed": "agentrl.plugins.planner.memory_plan:rehearsed_demand"},
)

SFT = Plugin(
    commands={
        "sft": PluginCommand(
            "agentrl.plugins.sft.sft_command:sft",
            "fine-tune on conversations, or on the records of a run",
        )
    },
    run_preparations={"warm_start": "agentrl.plugins.sft.warm_start:warm_start"},
    exports={"chat": "agentrl.plugins.sft.demonstrations.conversations:export_chat"},
)

STORED_TURNS = Plugin(
    task_sources={"stored": "agentrl.plugins.stored_turns.stored_source:STORED"},
    run_checks={"stored turns": "agentrl.plugins.stored_turns.stored_source:check_start"},
)

TOOL_ENVIRONMENTS = Plugin(
    commands={
        "env": PluginCommand(
            "agentrl.plugins.tool_environments.env_command:env",
            "up: serve MCP servers behind one address, isolated by client",
        )
    }
)
