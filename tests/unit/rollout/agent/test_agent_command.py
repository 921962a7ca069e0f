"""Programs that play rollouts: processes of their own, which know the policy by their environment."""

import asyncio
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
from harness.scripted_engine import replies, serve_script
from support.agents import open_stage
from support.play import begin_run

from agentrl.config.sections import AgentSection, RolloutSection, RootConfig
from agentrl.errors import AgentError, ConfigError
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import RolloutResult
from agentrl.rollout.agent import AgentEndpoint, configured_agent
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore

QUERY = 'It\'s $(reboot) {model}; "quoted"\nWhat does the lamp cost?'
TASK = MCPTask(id="train/0/q1", query=QUERY, num_generations=2, answer="7")
ASK = """
import json, os, sys, urllib.request
body = {"model": os.environ["AGENTRL_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
NOWHERE = AgentEndpoint("http://127.0.0.1:9/v1", "m", "k")


def program(folder: Path, *lines: str) -> str:
    """Write a program that asks the policy first; return how it is called."""
    path = folder / "agent.py"
    path.write_text(ASK + "\n".join(lines))
    return f"{sys.executable} {path}"


def config_of(command: str, *names: str) -> RootConfig:
    return RootConfig(agents=AgentSection(agent_command=command, agent_env=names))


async def play(
    store: TrajectoryStore, renderer: Renderer, command: str, seconds: float = 60.0
) -> tuple[RolloutResult, list[int], list[int]]:
    """Let a program play a slot; return the result, and the ids stored and drawn."""
    agent = configured_agent(config_of(command))
    limits = RolloutSection(rollout_timeout_seconds=seconds)
    with serve_script(renderer, replies("<answer>7</answer>")) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine, rollout=limits) as stage:
            result, (turn,) = await stage.play(agent)
        return result, turn.output_ids.tolist(), engine.reply_ids("<answer>7</answer>")


async def test_what_a_program_prints_is_the_answer(
    store: TrajectoryStore, renderer: Renderer, tmp_path: Path
) -> None:
    command = program(tmp_path, f"assert sys.argv[1] == {QUERY!r}", "print(answer)")
    result, stored, drawn = await play(store, renderer, f"{command} {{query}}")
    assert result == RolloutResult("answered", "7")
    assert stored == drawn


async def test_a_script_is_named_from_the_folder_of_the_run(
    store: TrajectoryStore, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "print(answer)")
    monkeypatch.chdir(tmp_path)
    result, _, _ = await play(store, renderer, f"{sys.executable} agent.py {{query}}")
    assert result.final_answer == "7"
    with pytest.raises(ConfigError, match=f"nowhere.py: no such file in {tmp_path}"):
        configured_agent(config_of("python nowhere.py {query}"))


def test_a_program_that_would_not_be_told_the_question_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--agent_command has no \{query\}"):
        configured_agent(config_of(sys.executable))


async def test_a_program_may_write_its_answer_into_a_file_and_chatter(
    store: TrajectoryStore, renderer: Renderer, tmp_path: Path
) -> None:
    lines = ("print('x' * 3_000_000)", "open(sys.argv[2], 'w').write('41')")
    command = f"{program(tmp_path, *lines)} {{query}} {{answer_file}}"
    result, _, _ = await play(store, renderer, command)
    assert result.final_answer == "41"


async def test_a_failed_program_is_scored_and_says_its_last_word(
    store: TrajectoryStore, renderer: Renderer, tmp_path: Path
) -> None:
    command = program(tmp_path, "sys.exit('no more ideas')")
    result, _, _ = await play(store, renderer, f"{command} {{query}}")
    assert result.outcome == "agent_error"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import nothing_like_it", "status 1: .*nothing_like_it"),
        ("raise SystemExit(3)", "status 3, with nothing on stderr"),
    ],
)
async def test_a_program_that_fails_before_it_asks_is_not_the_policys_doing(
    store: TrajectoryStore, renderer: Renderer, source: str, problem: str
) -> None:
    agent = configured_agent(config_of(f"{sys.executable} -c '{source}' {{query}}"))
    with serve_script(renderer, replies()) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            with pytest.raises(AgentError, match=problem):
                await stage.play(agent)


async def test_a_program_out_of_time_ends_with_all_that_it_started(
    store: TrajectoryStore, renderer: Renderer, tmp_path: Path
) -> None:
    marked = f"600.{os.getpid()}{time.monotonic_ns()}"
    lines = (
        "import subprocess, time",
        f"subprocess.Popen(['sleep', {marked!r}], start_new_session=True)",
        f"subprocess.run(['sleep', {marked!r}])",
    )
    result, _, _ = await play(store, renderer, f"{program(tmp_path, *lines)} {{query}}", 3.0)
    assert result.outcome == "time_limit"
    deadline = time.monotonic() + 30
    while any(marked in (one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_a_program_sees_no_secret_of_the_sampler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONGODB_URI", "mongodb://secret")
    monkeypatch.setenv("MINE", "yes")
    agent = configured_agent(config_of("sh -c env {query}", "MINE"))
    printed = str(await agent(TASK, NOWHERE))  # type: ignore[misc]
    assert "mongodb" not in printed
    assert "MINE=yes" in printed
    assert "OPENAI_BASE_URL=http://127.0.0.1:9/v1" in printed
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:9\n" in printed
    home = next(line for line in printed.splitlines() if line.startswith("HOME="))
    assert not Path(home.removeprefix("HOME=")).exists()


@pytest.mark.parametrize(
    ("command", "names", "message"),
    [
        ("no-such-program {query}", (), "program 'no-such-program' not found"),
        ("", (), "program '' not found"),
        ("env 'x", (), "No closing quotation"),
        ("env {question}", (), "unknown placeholder {question} (known: query,"),
        ("env {query}", ("NOT_SET_AT_ALL",), "NOT_SET_AT_ALL is not set"),
    ],
)
def test_a_command_that_cannot_run_is_refused_in_one_line(
    command: str, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        configured_agent(config_of(command, *names))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_braces_that_are_no_placeholder_stay() -> None:
    configured_agent(config_of("env '{\"a\": 1}' ${HOME} {query}"))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("sh -c '{query}'", "query"),
        ("env A=1 bash -lc 'my-agent \"{query}\"'", "query"),
        ("bash -o pipefail -e -c 'cat > /dev/null; echo {task_id}'", "task_id"),
        (f"{sys.executable} -c 'print(\"{{query}}\")'", "query"),
        (f"{sys.executable} -Ic'print(\"{{query}}\")'", "query"),
        ("env perl -pe '{query}'", "query"),
        ("env ssh host my-agent {query}", "query"),
    ],
)
def test_the_text_of_a_question_is_no_program(command: str, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured_agent(config_of(command))
    assert f"would run the text of {{{name}}} as a program" in str(refused.value)
    assert "$1" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "command",
    [
        "sh -c 'my-agent --url {base_url} \"$1\"' sh {query}",
        f"{sys.executable} -m agent -c {{query}}",
        "bash -e agent.sh -c {query}",
    ],
)
def test_a_question_may_be_an_argument_of_an_interpreter(command: str) -> None:
    configured_agent(config_of(command))
