"""Says before the start what the programs of tools and agents see and write, and what confines them."""

from agentrl.config.sections import RootConfig
from agentrl.launcher.cluster.child_commands import tool_server_command
from agentrl.rollout.worker.resources import tools_of
from agentrl.runtime.processes.wall import wall_gap
from agentrl.tools.tool_walls import tool_wall


def open_to_tools(config: RootConfig) -> list[str]:
    """Return a note on what the programs of tools write to, and on each bound that is not kept.

    Raises:
        ConfigError: a program would see what is private to the run, or cannot be confined.
    """
    tools = tools_of(config)
    commands = [server for server in tools.servers.values() if server.command is not None]
    command = config.tools.tool_server_command
    if command is not None:
        argv = tool_server_command(command.get_secret_value(), port=0)
        tool_wall(config, argv, named_by="--tool_server_command")
    elif not commands:
        return []
    if wall_gap() is not None:
        return [
            "programs of tools see and change all that you can, answers and keys included "
            f"(--allow_unconfined_tools; this machine cannot confine them: {wall_gap()})"
        ]
    paths = (*tools.wall.writable, *(path for one in commands for path in one.writable))
    named = "".join(f"{path}, " for path in dict.fromkeys(map(str, paths)))
    more = "" if paths else " (--tool_writable_paths names more)"
    return [f"programs of tools write only to {named}scratch folders of their own{more}"]
