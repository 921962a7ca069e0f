"""Says before the start what the programs of tools may write, and what else this machine lets them reach."""

from agentrl.config.sections import RootConfig
from agentrl.rollout.worker.resources import tools_of
from agentrl.runtime.processes.confinement import confinement_gap, open_ports_reason


def open_to_tools(config: RootConfig) -> list[str]:
    """Return a note on what the programs of tools write to, and on each bound that is not kept."""
    tools = tools_of(config)
    commands = [server for server in tools.servers.values() if server.command is not None]
    if config.tools.tool_server_command is None and not commands:
        return []
    if confinement_gap() is None:
        paths = (*tools.writable_paths, *(path for one in commands for path in one.writable))
        named = "".join(f"{path}, " for path in dict.fromkeys(map(str, paths)))
        more = "" if paths else " (--tool_writable_paths names more)"
        notes = [f"programs of tools write only to {named}scratch directories of their own{more}"]
    else:
        notes = [
            "programs of tools see and change the files and processes of this user, answers and keys "
            f"included: this machine provides no namespaces ({confinement_gap()}); use a container, "
            "as in deploy/images"
        ]
    if open_ports_reason() is not None:
        notes.append(
            "programs of tools can connect to the run's database and inference servers: this machine "
            f"cannot close ports ({open_ports_reason()}); let the database ask for a password"
        )
    return notes
