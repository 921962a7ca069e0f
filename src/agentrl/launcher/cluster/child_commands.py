"""The command lines of the processes that `agentrl run` starts."""

import shlex
import shutil
import sys
from pathlib import Path

from agentrl.config.named_files import existing_or_shipped, shipped_file
from agentrl.config.sections import TrainerSection
from agentrl.errors import ConfigError
from agentrl.runtime.processes.child_processes import program

# The launcher is its only user; every keep-alive makes the file longer.
_PRIVATE_STORE = "store_type=file,keep_alive_interval=86400"
RANK_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Variables of a trainer command, whose launcher would otherwise open a store for the ranks."""


def agentrl_command(command: str, config_path: Path, *flags: str) -> list[str]:
    """Return the argv of one AgentRL process that reads the run's resolved configuration."""
    return [sys.executable, "-m", "agentrl", command, "--config", str(config_path), *flags]


def trainer_command(
    trainer: TrainerSection, config_path: Path, *flags: str, command: str = "train"
) -> list[str]:
    """Return the trainer's argv: plain Python for one rank, else `accelerate launch`."""
    if trainer.num_processes == 1:
        return agentrl_command(command, config_path, *flags)
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(shipped_file("assets/fsdp2_dst.yml"))),
        *("--num_processes", str(trainer.num_processes)),
        # A store that only this user can read, where the static one listens on every address.
        *("--rdzv_backend", "c10d", "--rdzv_conf", _PRIVATE_STORE, "--main_process_port", "0"),
        *("-m", "agentrl", command, "--config", str(config_path), *flags),
    ]


def tool_server_command(template: str, port: int) -> list[str]:
    """Return the tool server's argv.

    `{port}` is filled in, programs are found by `runtime.processes.child_processes.program`, and a script
    that ships with the package (`examples/shop/server.py`) from any working directory.
    """
    try:
        argv = [argument.replace("{port}", str(port)) for argument in shlex.split(template)]
    except ValueError as error:
        raise ConfigError(f"--tool_server_command: {error}") from None
    if argv:
        argv[0] = program(argv[0])
    if argv[:1] == [sys.executable] and len(argv) > 1:
        script = existing_or_shipped(Path(argv[1]))
        argv[1] = str(script) if script.is_absolute() else argv[1]
    return argv


def check_tool_server_command(template: str) -> None:
    """Check that a command can start and receives its port."""
    argv = tool_server_command(template, port=0)
    if not argv or shutil.which(argv[0]) is None:
        raise ConfigError(f"--tool_server_command {argv[0] if argv else ''!r}: program not found")
    script = Path(argv[1]) if len(argv) > 1 else Path()
    if argv[0] == sys.executable and script.suffix == ".py" and not script.is_file():
        raise ConfigError(
            f"--tool_server_command: {script}: no such file in {script.absolute().parent}"
        )
    if "{port}" not in template:
        raise ConfigError(
            "--tool_server_command has no {port}: the server must serve HTTP on the port that "
            "replaces it; configure a stdio server in --mcp_servers"
        )
