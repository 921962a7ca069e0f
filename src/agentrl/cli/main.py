"""The `agentrl` command: dispatches to its commands, and reports errors in one line.

Commands are imported on use, so `agentrl --help` is fast and a sampler never imports torch.
"""

import codecs
import errno
import io
import json
import logging
import os
import select
import stat
import sys
from collections.abc import Sequence
from functools import cache

import click

from agentrl.errors import AgentRLError
from agentrl.plugin_registry import PluginCommand, imported, installed_plugins
from agentrl.runtime.http.proxies import direct_to_this_machine
from agentrl.runtime.processes.memory import keep_memory_private

_OWN: dict[str, tuple[str, str]] = {
    "init": ("commands:init", "create a project: tools, questions, scorer, configuration"),
    "run": ("commands:run", "train on this machine: store, servers, samplers and trainer"),
    "sample": ("commands:sample", "run one sampler process; start as many as you like"),
    "train": ("commands:train", "run the trainer (under accelerate launch for several ranks)"),
    "serve": ("commands:serve", "run an inference server, registered and kept up to date"),
    "teach": ("teach_command:teach", "give other models' logprobs to a run's tokens"),
    "eval": ("commands:evaluate", "score a checkpoint on held-out questions"),
    "doctor": ("commands:doctor", "check this machine: packages, GPUs, database, servers, tools"),
    "export": ("commands:export", "merge a run's adapter (LoRA) into its model's weights"),
    "tasks": ("task_commands:tasks", "add|list|retry|stats: manage the questions of a run"),
    "replay": ("replay_command:replay", "repeat recorded optimizer steps, and compare"),
    "retrain": ("retrain_command:retrain", "make a run's steps again without some records"),
    "store": (
        "store_commands:store",
        "up|set|rescore|stats|export|import|bundle|compact|drop: database",
    ),
}
"""Command -> the module of this package and the function in it, and its summary."""


_MAX_PROBLEM_CHARS = 10_000
_NOT_OWNER_HINT = "run the command as its owner, or in a folder of your own"
_HINTS = {
    errno.EACCES: _NOT_OWNER_HINT,
    errno.EPERM: _NOT_OWNER_HINT,
    errno.EROFS: "change to another folder",
    errno.ENAMETOOLONG: "give a shorter path",
}


@cache
def commands() -> dict[str, PluginCommand]:
    """Return all commands by name: those of this package, then those of plugins.

    A plugin cannot replace a command of another owner.
    """
    own = {
        name: PluginCommand(f"agentrl.cli.{target}", summary)
        for name, (target, summary) in _OWN.items()
    }
    added: dict[str, PluginCommand] = {}
    for plugin in installed_plugins().values():
        added = {**plugin.commands, **added}
    return own | {name: added[name] for name in sorted(added.keys() - own.keys())}


class _Commands(click.Group):
    """The commands, imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = commands()
        if cmd_name not in known:
            raise click.UsageError(f"unknown command {cmd_name!r}; one of {', '.join(known)}", ctx)
        command: click.Command = imported(known[cmd_name].target)
        return command

    def get_help(self, ctx: click.Context) -> str:
        from agentrl.runtime.installation import package_version

        lines = [
            f"agentrl {package_version()}",
            "Reinforcement learning for language-model agents.",
            "",
        ]
        lines.append("usage: agentrl COMMAND [--flag value ...]")
        lines.append("       agentrl COMMAND --help explains its flags")
        lines += ["", *(f"  {name:11} {one.summary}" for name, one in commands().items())]
        return "\n".join(lines)


agentrl = _Commands("agentrl", context_settings={"help_option_names": ["--help", "-h"]})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status (2: usage error, 1: failure, 75: no database)."""
    _open_closed_outputs()
    _escape_unencodable_output()
    _restrict_umask()
    keep_memory_private()
    # Read when a library of OpenMP loads: threads that spin at barriers take cores from the run's
    # other processes, which inherit this.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _silence_mcp_tracebacks()
    os.environ.update(direct_to_this_machine(os.environ))
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if arguments[0] in ("version", "--version"):
        from agentrl.runtime.installation import package_version

        print(package_version())
        return 0
    if arguments[0] == "help":
        arguments[0] = "--help"
    name = f"agentrl {arguments[0]}" if arguments[0] in commands() else "agentrl"
    try:
        with agentrl.make_context("agentrl", arguments) as context:
            status: int = agentrl.invoke(context)
        sys.stdout.flush()
        return status
    except click.exceptions.Exit as end:  # after a help text
        return end.exit_code
    except click.UsageError as error:
        from agentrl.config.command_line import usage_problem

        _print_error(name, usage_problem(error))
        return 2
    except AgentRLError as error:
        _print_error(name, str(error))
        return error.exit_status
    except KeyboardInterrupt:
        from agentrl.runtime.processes.signals import INTERRUPTED

        return INTERRUPTED
    except OSError as error:
        problem = _environment_problem(error)
        if problem is None:
            raise
        if problem:
            _print_error(name, problem)
        return 1


def _silence_mcp_tracebacks() -> None:
    """Keep the MCP SDK's tracebacks off the console of commands without a log file."""
    logging.getLogger("mcp").addHandler(logging.NullHandler())


def _open_closed_outputs() -> None:
    """Redirect closed outputs (`>&-`), for which Python creates no stream, to the null device."""
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _escape_unencodable_output() -> None:
    r"""Print `\u00fc` if the output's encoding lacks ü, instead of failing."""

    def escape(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        # Newlines as in JSON, so that the output of `--json` stays parseable.
        return json.dumps(error.object[error.start : error.end])[1:-1], error.end

    codecs.register_error("agentrl-escaped", escape)
    # Standard error already escapes.
    if (
        isinstance(sys.stdout, io.TextIOWrapper)
        and codecs.lookup(sys.stdout.encoding).name != "utf-8"
    ):
        sys.stdout.reconfigure(errors="agentrl-escaped")


def _restrict_umask() -> None:
    """Remove the write access of other users that a umask of 000 grants; groups are unchanged."""
    os.umask(os.umask(0o077) | stat.S_IWOTH)


def _environment_problem(error: OSError) -> str | None:
    """Return a message for an error of the environment; None for an error of the program.

    The message is empty if the reader of the output has closed the pipe, as with `| head`.
    """
    if isinstance(error, BrokenPipeError):
        return "" if _stdout_is_closed() else None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        if error.filename is None:  # the rest of the buffer could not be written either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return f"{error.filename or 'the output'}: {error.strerror}; free some space"
    if error.errno in _HINTS and error.filename is not None:
        return f"{error.filename}: {error.strerror}; {_HINTS[error.errno]}"
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the current folder was deleted; change to another"
    return None


def _print_error(name: str, problem: str) -> None:
    """Print an error on standard error, without secrets and with external text made printable."""
    from agentrl.config.secrets import redact
    from agentrl.runtime.printable import printable

    print(f"{name}: {printable(redact(problem), _MAX_PROBLEM_CHARS)}", file=sys.stderr)


def _stdout_is_closed() -> bool:
    """Return whether the reader of the output has closed the pipe; if so, discard further output."""
    # Polls instead of writing again: the failed write discarded its data, so the buffer is empty.
    output = select.poll()
    output.register(sys.stdout.fileno(), select.POLLOUT)
    is_closed = any(event & select.POLLERR for _, event in output.poll(0))
    if is_closed:
        # The interpreter flushes standard output again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_closed
