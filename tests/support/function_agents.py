"""Agents that are plain functions; they need nothing but httpx."""

import json
import operator
import runpy
import sys
from pathlib import Path
from typing import Any

import httpx

from agentrl.rewards import GroundTruth, Rollout
from agentrl.schema import AgentResult
from agentrl.schema.agent_endpoint import AgentEndpoint

CATALOGUE = runpy.run_path(str(Path(__file__).parents[2] / "examples/shop/server.py"))["CATALOGUE"]
_OPERANDS = {"a": "integer", "b": "integer"}
_OPERATORS = {"add": "add", "subtract": "sub", "multiply": "mul"}
_SHAPES = {
    "price": ("Price of a pack", {"item": "string"}),
    "stock": ("Packs in stock", {"item": "string"}),
    "add": ("a + b", _OPERANDS),
    "subtract": ("a - b", _OPERANDS),
    "multiply": ("a * b", _OPERANDS),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in arguments.items()},
                "required": list(arguments),
            },
        },
    }
    for name, (description, arguments) in _SHAPES.items()
]
"""The tools of the demo's shop, which the demo's model knows how to call."""


async def shop_agent(task: Any, endpoint: AgentEndpoint) -> str | None:
    """Ask the model, and do what it asks for, as agents do that nobody wrote for training."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.query}]
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with httpx.AsyncClient(timeout=60, headers=headers) as client:
        for _ in range(5):
            body = {"model": endpoint.model, "messages": messages, "tools": TOOLS}
            response = await client.post(f"{endpoint.base_url}/chat/completions", json=body)
            response.raise_for_status()
            reply = response.json()["choices"][0]["message"]
            messages.append(reply)
            if not reply.get("tool_calls"):
                return str(reply["content"])
            for call in reply["tool_calls"]:
                result = _called(call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return None


async def two_conversations(task: Any, endpoint: AgentEndpoint) -> str | None:
    """Ask for a second opinion in a conversation of its own, and answer as the first one did."""
    answer = await shop_agent(task, endpoint)
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with httpx.AsyncClient(timeout=60, headers=headers) as client:
        message = {"role": "user", "content": f"Is {answer} right? {task.query}"}
        body = {"model": endpoint.model, "messages": [message]}
        response = await client.post(f"{endpoint.base_url}/chat/completions", json=body)
        response.raise_for_status()
    return answer


def _called(name: str, arguments: str) -> str:
    try:
        given = json.loads(arguments)
        if name in ("price", "stock"):
            return str(CATALOGUE[given["item"]][name])
        return str(getattr(operator, _OPERATORS[name])(given["a"], given["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"wrong call: {error}"


async def failing_agent(task: Any, endpoint: AgentEndpoint) -> str:
    """Fail as the user's own code may."""
    raise ValueError("my own mistake")


def rewarding_agent(task: Any, endpoint: AgentEndpoint) -> AgentResult:
    """Hand over a reward, or none that anybody could train on."""
    reward = float("nan") if task.query == "nan" else 0.5
    return AgentResult("7", reward=reward, step_rewards=(0.25, None), metrics={"won": True})


def threaded_agent(task: Any, endpoint: AgentEndpoint) -> str:
    """Answer without any model."""
    sys.stdout.write("frameworks print what they do\n")
    return f"{task.query} at {endpoint.base_url}"


async def contains_answer(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """Reward text that holds the truth."""
    return float(f"<answer>{ground_truth}</answer>" in solution_str)


def by_calls(answer: str | None, truth: GroundTruth, rollout: Rollout) -> float:
    """Reward a rollout that called a tool with the question's user."""
    return float(
        any(call.arguments.get("user") == truth.columns.get("user") for call in rollout.calls)
    )


async def text_and_answer(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """Reward any text by half, so that a reward that was not asked for is told from a wrong answer."""
    right = await contains_answer(data_source, solution_str, ground_truth, extra_info)
    return 0.5 * float(bool(solution_str)) + 0.5 * right
