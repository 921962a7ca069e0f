"""`--agent_command`: an unmodified program runs a rollout in its own process.

The program finds the policy's address and key in its environment, under the names that OpenAI's and
Anthropic's clients read, and works in an empty folder that is its home. A model decides what it does,
so that it sees only what its command names (`tools.tool_walls`). What it prints, or writes
into `{answer_file}`, is the answer; a nonzero exit status is a failure of the agent.
"""

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.config.sections import RootConfig
from agentrl.errors import AgentError, ConfigError, UserCodeError
from agentrl.rollout.agent.agent_loading import IS_ELSEWHERE, AgentFunction, load_agent
from agentrl.runtime.processes.child_processes import end_group, keeper_command
from agentrl.runtime.processes.wall import (
    inherited_environment,
    named_paths,
    scratch_directory,
    wall_hint,
)
from agentrl.schema import MCPTask
from agentrl.schema.agent_endpoint import AgentEndpoint
from agentrl.tools.tool_walls import tool_wall

PLACEHOLDERS = ("query", "task_id", "model", "base_url", "anthropic_base_url", "answer_file")
_QUESTION_PLACEHOLDERS = {"query", "task_id"}
# `${NAME}` belongs to the shell.
_PLACEHOLDER = re.compile(r"(?<!\$)\{(\w+)\}")
_INTERPRETER = re.compile(
    r"(?P<c>(?:ba|da|fi|k|mk|a|c|tc|z)?sh|python[\d.]*|pypy[\d.]*)|(?P<e>perl|ruby|node|lua)|(?P<any>ssh)"
)
"""Programs that run a text, by the option that begins it (`ssh`: all its arguments)."""
_OPTION_WITH_VALUE = re.compile(r"[-+][A-Za-z]*[oOWX]")
_MAX_OUTPUT_BYTES = 1 << 20
_END_SECONDS = 2.0


def configured_agent(config: RootConfig) -> AgentFunction:
    """Return the configured agent: a function (`agent`), or a program (`agent_command`)."""
    agent = config.agents.agent
    return command_agent(config) if agent is None else load_agent(agent)


def command_agent(config: RootConfig) -> AgentFunction:
    """Return the agent that runs `agent_command`."""
    section = config.agents
    command = "" if section.agent_command is None else section.agent_command.get_secret_value()
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--agent_command: {error}") from None
    if not words or shutil.which(words[0]) is None:
        program = words[0] if words else ""
        raise ConfigError(f"--agent_command: program {program!r} not found on this machine")
    _check_placeholders(_PLACEHOLDER.findall(command))
    _check_program_texts(words)
    program = words[0] if "/" not in words[0] else _absolute(words[0])
    words = [program, *map(_absolute, words[1:])]
    missing = [name for name in section.agent_env if name not in os.environ]
    if missing:
        raise ConfigError(f"--agent_env: the environment variable {missing[0]} is not set")
    given = {name: os.environ[name] for name in section.agent_env}
    environment = inherited_environment() | given
    # The words before a question replaces a placeholder: what it names is not opened.
    wall = tool_wall(config, named_paths((*words, *given.values())), named_by="--agent_command")

    async def play(task: MCPTask, endpoint: AgentEndpoint) -> str | None:
        with scratch_directory("agentrl-agent-") as folder:
            answer_file = Path(folder, "answer.txt")
            values = {
                "query": task.query,
                "task_id": task.id,
                "model": endpoint.model,
                "base_url": endpoint.base_url,
                "anthropic_base_url": endpoint.anthropic_base_url,
                "answer_file": str(answer_file),
            }
            # Substituted after splitting, so that a question always stays one argument.
            arguments = [_PLACEHOLDER.sub(lambda m: values[m[1]], word) for word in words]
            own = replace(wall, scratch=Path(folder), directory=folder)
            variables = environment | _endpoint_variables(endpoint) | own.environment()
            printed = await _run(
                await asyncio.to_thread(own.command, arguments), variables, words[0]
            )
            return _read_answer(answer_file) if "{answer_file}" in command else printed

    setattr(play, IS_ELSEWHERE, True)
    play.__name__ = Path(words[0]).name
    return play


def _check_placeholders(named: Sequence[str]) -> None:
    for name in named:
        if name not in PLACEHOLDERS:
            raise ConfigError(
                f"--agent_command: unknown placeholder {{{name}}} (known: {', '.join(PLACEHOLDERS)})"
            )
    if _QUESTION_PLACEHOLDERS.isdisjoint(named):
        raise ConfigError(
            "--agent_command has no {query}; add it where the program expects the question"
        )


def _check_program_texts(words: Sequence[str]) -> None:
    for place, word in enumerate(words):
        interpreter = _INTERPRETER.fullmatch(Path(word).name)
        texts = () if interpreter is None else _program_text(interpreter, words[place + 1 :])
        for name in _PLACEHOLDER.findall(" ".join(texts)):
            if name in _QUESTION_PLACEHOLDERS:
                raise ConfigError(
                    f"--agent_command: {word} would run the text of {{{name}}} as a program; pass it "
                    f"as an argument (sh -c 'my-agent \"$1\"' sh {{{name}}}), or write a script"
                )


def _program_text(interpreter: re.Match[str], arguments: Sequence[str]) -> Sequence[str]:
    """Return those arguments of an interpreter that it reads as a program."""
    option = interpreter.lastgroup
    if option == "any":
        return arguments
    skips = False
    for place, word in enumerate(arguments):
        if not skips and not word.startswith(("-", "+")):
            break  # a script, whose own options follow
        if not skips and re.match(rf"-[A-Za-z]*{option}|--(?:eval|command)", word):
            return arguments[place : place + 2]
        skips = not skips and _OPTION_WITH_VALUE.fullmatch(word) is not None
    return ()


def _absolute(word: str) -> str:
    """Return a word of the command; the path of a file becomes absolute.

    The program runs in another folder.
    """
    if os.path.isfile(word):  # Path.is_file raises on names that are too long
        return str(Path(word).absolute())
    if re.fullmatch(r"[^\s{]+\.py", word):
        folder = Path(word).absolute().parent
        raise ConfigError(f"--agent_command: {word}: no such file in {folder}")
    return word


def _read_answer(path: Path) -> str | None:
    """Return the answer that a program wrote; None if it wrote none."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return file.read(_MAX_OUTPUT_BYTES).decode(errors="replace")


def _endpoint_variables(endpoint: AgentEndpoint) -> dict[str, str]:
    """Return the policy's address under the variable names that clients and litellm read."""
    return {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_BASE": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": endpoint.anthropic_base_url,
        "ANTHROPIC_API_BASE": endpoint.anthropic_base_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "AGENTRL_MODEL": endpoint.model,
        "NO_COLOR": "1",
        "TERM": "dumb",
    }


async def _run(arguments: list[str], environment: Mapping[str, str], name: str) -> str:
    """Run a program until it exits; return its output."""
    try:
        process = await asyncio.create_subprocess_exec(
            *keeper_command(arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise AgentError(f"{name} cannot be started: {error}") from error
    assert process.stdout is not None
    assert process.stderr is not None
    reading = asyncio.gather(_last_bytes(process.stdout), _last_bytes(process.stderr))
    try:
        status = await process.wait()
    finally:
        await end_group(process, (signal.SIGTERM, signal.SIGHUP), _END_SECONDS)
        await process.wait()
    # A child process that left the session survives and may hold the pipes open.
    with contextlib.suppress(TimeoutError):
        out, err = await asyncio.wait_for(reading, _END_SECONDS)
        if status == 0:
            return out
        last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "")
        reason = f": {last[:500]}" if last else ", with nothing on stderr"
        raise UserCodeError(f"{name} exited with status {status}{reason}{wall_hint(err)}")
    raise UserCodeError(f"{name} left processes running that keep its output open")


async def _last_bytes(stream: asyncio.StreamReader) -> str:
    """Read until end of file; return the last mebibyte as text."""
    tail = bytearray()
    while chunk := await stream.read(1 << 16):
        tail += chunk
        del tail[:-_MAX_OUTPUT_BYTES]
    return tail.decode(errors="replace")
