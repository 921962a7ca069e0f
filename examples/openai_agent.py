"""An agent that uses OpenAI's SDK, and its training on this machine.

    pip install openai
    python examples/openai_agent.py

`agentrl run --agent examples/openai_agent.py:play --train_file ...` trains the same agent.
"""

import json
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from agentrl import AgentTrainer
from agentrl.schema import AgentEndpoint, GroundTruth, MCPTask

STOCK = {"honey": 13, "candles": 48, "corn": 25, "silk": 39, "rice": 15}
MAX_CALLS = 5


def tool(name: str, description: str, **arguments: str) -> Any:
    """Return a tool in OpenAI's form; all its arguments are required."""
    properties = {key: {"type": kind} for key, kind in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    tool("stock", "Packs in stock", item="string"),
    tool("add", "a + b", a="integer", b="integer"),
]


def use(name: str, arguments: str) -> str:
    """Run a tool call; answer an invalid call with the reason."""
    try:
        given = json.loads(arguments)
        return str(STOCK[given["item"]] if name == "stock" else given["a"] + given["b"])
    except (KeyError, TypeError, ValueError) as error:
        return f"wrong call: {type(error).__name__}: {error}"


async def play(task: MCPTask, endpoint: AgentEndpoint) -> str | None:
    """Let the model call tools until it answers."""
    messages: list[Any] = [{"role": "user", "content": task.query}]
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        for _ in range(MAX_CALLS):
            completion = await client.chat.completions.create(
                model=endpoint.model, messages=messages, tools=TOOLS
            )
            message = completion.choices[0].message
            if not message.tool_calls:
                return message.content
            messages.append(message)
            for call in message.tool_calls:
                if call.type != "function":
                    continue
                result = use(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


def reward(answer: str, truth: GroundTruth) -> float:
    """Return 1 for the correct number, else 0."""
    return float(answer.strip() == str(truth.answer))


if __name__ == "__main__":
    trainer = AgentTrainer(
        play,
        reward_func=reward,
        train_dataset=Path(__file__).parent / "project/questions.jsonl",
        config={
            "run_name": "openai_agent",
            "model_name_or_path": "assets/demo/model",  # ships with AgentRL; name yours here
            "max_new_tokens": 48,
            "groups_per_step": 4,
            "learning_rate": 0.0004,
            "max_steps": 3,
        },
        run_path="runs/openai_agent",
    )
    print(trainer.train()["reward_mean"])
