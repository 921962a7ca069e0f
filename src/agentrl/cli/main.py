"""`agentrl COMMAND [flags]`: dispatch, help, and one line for every user error."""

import importlib
import sys
from collections.abc import Callable, Sequence

from agentrl import __version__
from agentrl.errors import AgentRLError, ConfigError

# command -> (module with a `main(argv) -> int`, one-line help). Modules are imported when used, so
# that `agentrl --help` stays fast and a sampler never meets torch.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("agentrl.cli.run", "train: starts store, servers, samplers and trainer on one machine"),
    "sample": ("agentrl.cli.sample", "one sampler process; start as many as you like"),
    "train": ("agentrl.cli.train", "the trainer (under accelerate launch for several ranks)"),
    "sft": ("agentrl.cli.sft", "supervised fine-tuning on conversations, or on records of a run"),
    "serve": ("agentrl.cli.serve", "an inference server, registered and kept up to date"),
    "eval": ("agentrl.cli.evaluate", "score a checkpoint on held-out questions"),
    "export": ("agentrl.cli.export", "add a run's adapter (LoRA) into its model's weights"),
    "tasks": ("agentrl.cli.tasks", "add|list|retry|stats: the questions of a run"),
    "inspect": ("agentrl.cli.inspect", "look into a run: progress, records turn by turn, failures"),
    "env": ("agentrl.cli.env", "up: serve MCP servers behind one address, isolated by client"),
    "verify": ("agentrl.cli.verify", "check that merged training is exact: agentrl verify merge"),
    "store": (
        "agentrl.cli.store",
        "up|set|stats|export|import|rescore|compact|drop: the database of a run",
    ),
}


def usage() -> str:
    """Return the help text of the bare command."""
    lines = [f"agentrl {__version__}: reinforcement learning for language-model agents", ""]
    lines.append(
        "usage: agentrl COMMAND [--flag value ...]   (agentrl COMMAND --help for its flags)"
    )
    lines += ["", *(f"  {name:8} {text}" for name, (_, text) in COMMANDS.items())]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status (2: the user's mistake, 1: a failure)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(usage())
        return 0
    if arguments[0] in ("--version", "version"):
        print(__version__)
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        print(
            f"agentrl: unknown command {command!r}; one of {', '.join(COMMANDS)}", file=sys.stderr
        )
        return 2
    try:
        if "--help" in rest or "-h" in rest:
            from agentrl.cli.help import command_help

            print(command_help(command, COMMANDS[command][1]))
            return 0
        entry: Callable[[Sequence[str]], int] = importlib.import_module(COMMANDS[command][0]).main
        return entry(rest)
    except ConfigError as error:
        print(f"agentrl {command}: {error}", file=sys.stderr)
        return 2
    except AgentRLError as error:
        print(f"agentrl {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        from agentrl.runtime.signals import INTERRUPTED

        return INTERRUPTED
