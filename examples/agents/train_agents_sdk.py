"""Train an agent of OpenAI's Agents SDK: python examples/agents/train_agents_sdk.py MODEL."""

import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from agentrl import AgentTrainer
from agentrl.schema import AgentEndpoint, GroundTruth, MCPTask

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Return a + b."""
    return a + b


async def play(task: MCPTask, endpoint: AgentEndpoint) -> str:
    """Let the agent answer; its client finds the policy at the endpoint."""
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        model = OpenAIChatCompletionsModel(model=endpoint.model, openai_client=client)
        agent = Agent(name="adder", model=model, tools=[add])
        return str((await Runner.run(agent, task.query, max_turns=20)).final_output)


def reward(answer: str, truth: GroundTruth) -> float:
    """Return 1 if the right number ends the answer, else 0."""
    return float(answer.strip(" .").endswith(str(truth.answer)))


if __name__ == "__main__":
    config = {"model_name_or_path": sys.argv[1], "max_new_tokens": 256, "max_steps": 50}
    data = [{"query": f"What is {n} + {n * n}?", "answer": str(n + n * n)} for n in range(200)]
    trainer = AgentTrainer(play, config, reward, data, run_path="runs/agents_sdk")
    print(trainer.train()["reward_mean"])
