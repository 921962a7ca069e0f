"""Says before the start what the programs of tools reach where this machine cannot confine them."""

from agentrl.config.sections import RootConfig
from agentrl.rollout.worker.resources import tools_of
from agentrl.runtime.processes.confinement import confinement_gap, open_ports_reason


def open_to_tools(config: RootConfig) -> list[str]:
    """Return a note on each bound that this machine does not keep."""
    section = config.tools
    servers = tools_of(config).servers.values()
    if section.tool_server_command is None and all(one.command is None for one in servers):
        return []
    notes = []
    if confinement_gap() is not None:
        notes.append(
            "programs of tools see the files and processes of this user, answers and keys included: "
            f"this machine provides no namespaces ({confinement_gap()}); use a container, as in "
            "deploy/images"
        )
    if open_ports_reason() is not None:
        notes.append(
            "programs of tools can connect to the run's database and inference servers: this machine "
            f"cannot close ports ({open_ports_reason()}); let the database ask for a password"
        )
    return notes
