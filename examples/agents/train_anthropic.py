"""Train an agent written for Claude: python examples/agents/train_anthropic.py MODEL."""

import sys

from anthropic import AsyncAnthropic
from anthropic.types import MessageParam

from agentrl import AgentTrainer
from agentrl.schema import AgentEndpoint, GroundTruth, MCPTask


async def play(task: MCPTask, endpoint: AgentEndpoint) -> str:
    """Ask, and have the answer checked once."""
    messages: list[MessageParam] = [{"role": "user", "content": task.query}]
    base, key, said = endpoint.anthropic_base_url, endpoint.api_key, ""
    async with AsyncAnthropic(base_url=base, api_key=key, max_retries=0) as client:
        for more in ("Check it, and answer again.", ""):
            reply = await client.messages.create(
                model=endpoint.model, max_tokens=256, messages=messages
            )
            said = "".join(block.text for block in reply.content if block.type == "text")
            messages.append({"role": "assistant", "content": said or "-"})
            messages.append({"role": "user", "content": more})
    return said


def reward(answer: str, truth: GroundTruth) -> float:
    """Return 1 if the right number ends the answer, else 0."""
    return float(answer.strip(" .").endswith(str(truth.answer)))


if __name__ == "__main__":
    config = {"model_name_or_path": sys.argv[1], "max_new_tokens": 256, "max_steps": 50}
    data = [{"query": f"What is {n} + {n * n}?", "answer": str(n + n * n)} for n in range(200)]
    trainer = AgentTrainer(play, config, reward, data, run_path="runs/anthropic")
    print(trainer.train()["reward_mean"])
