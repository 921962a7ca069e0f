"""Requests that unchanged programs sent, played again: the second one continues the first.

`harness_requests/` has them as the programs wrote them (Claude Code 2.1, Codex 0.169, mini-swe-agent 2.4
over three dialects), with their words replaced and most of their tools left out.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.scripted_engine import replies, serve_script
from support.agents import MODEL, assert_prompts_as_sent, open_stage
from support.play import begin_run, tool_call

from agentrl.renderers.renderer import Renderer
from agentrl.rollout.agent import AgentEndpoint
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore

FOLDER = Path(__file__).parent / "harness_requests"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.json"))
TASK = MCPTask(id="train/0/q1", query="What does the lamp cost?", answer="7")
ANSWER = "<answer>7</answer>"
SHELLS = {"claude_code": ("Bash", "command"), "codex": ("exec_command", "cmd")}


def saved(program: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / f"{program}.json").read_text())
    return content


async def sent(
    endpoint: AgentEndpoint, recorded: Mapping[str, Any], number: int, call_id: str = ""
) -> str:
    """Send a request with our model's name and the id of the call that was given."""
    text = json.dumps(recorded["requests"][number])
    text = text.replace('"MODEL"', json.dumps(MODEL)).replace('"CALL"', json.dumps(call_id))
    keys = {"authorization": f"Bearer {endpoint.api_key}", "x-api-key": endpoint.api_key}
    async with httpx.AsyncClient(headers=recorded["headers"] | keys) as client:
        reply = await client.post(endpoint.base_url + recorded["path"], content=text)
    assert reply.status_code == 200, reply.text
    return reply.text


@pytest.mark.parametrize("program", PROGRAMS)
async def test_the_second_request_of_a_program_continues_the_first(
    store: TrajectoryStore, renderer: Renderer, program: str
) -> None:
    recorded = saved(program)
    name, argument = SHELLS.get(program, ("bash", "command"))
    call = f"Let me see.\n{tool_call(name, **{argument: 'echo 7'})}"

    async def play(task: MCPTask, endpoint: AgentEndpoint) -> str:
        said = await sent(endpoint, recorded, 0)
        call_id = re.search(r"call_\w+", said)
        assert call_id is not None
        assert ANSWER in await sent(endpoint, recorded, 1, call_id[0])
        return ANSWER

    with serve_script(renderer, replies(call, ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            _, (first, second) = await stage.play(play)
    assert (second.parent, second.branch_reason) == (0, None)
    prompts = [body["input_ids"] for body in engine.requests]
    assert second.shared_len == len(prompts[0]) + len(first.output_ids)
    assert [result.content for result in first.tool_results] == ["7 coins"]
    assert_prompts_as_sent([first, second], prompts)


async def test_a_function_of_a_namespace_is_called_by_both_of_its_names(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    told: list[dict[str, Any]] = []

    async def play(task: MCPTask, endpoint: AgentEndpoint) -> str:
        events = await sent(endpoint, saved("codex"), 0)
        lines = [line.removeprefix("data: ") for line in events.splitlines() if "data: " in line]
        told.extend(json.loads(lines[-1])["response"]["output"])
        return ANSWER

    with serve_script(renderer, replies(tool_call("multi_agent_v1__close_agent"))) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            await stage.play(play)
    (call,) = (item for item in told if item["type"] == "function_call")
    assert (call["namespace"], call["name"]) == ("multi_agent_v1", "close_agent")
