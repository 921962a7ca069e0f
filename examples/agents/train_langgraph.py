"""Train a LangGraph graph: python examples/agents/train_langgraph.py MODEL."""

import sys

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from agentrl import AgentTrainer
from agentrl.schema import AgentEndpoint, GroundTruth, MCPTask


async def play(task: MCPTask, endpoint: AgentEndpoint) -> str:
    """Run a graph of one node; its model is the policy at the endpoint."""
    model = ChatOpenAI(
        model=endpoint.model, base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
    )

    async def say(state: MessagesState) -> MessagesState:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("say", say)
    graph.add_edge(START, "say")
    graph.add_edge("say", END)
    done = await graph.compile().ainvoke({"messages": [HumanMessage(task.query)]})
    return str(done["messages"][-1].content)


def reward(answer: str, truth: GroundTruth) -> float:
    """Return 1 if the right number ends the answer, else 0."""
    return float(answer.strip(" .").endswith(str(truth.answer)))


if __name__ == "__main__":
    config = {"model_name_or_path": sys.argv[1], "max_new_tokens": 256, "max_steps": 50}
    data = [{"query": f"What is {n} + {n * n}?", "answer": str(n + n * n)} for n in range(200)]
    trainer = AgentTrainer(play, config, reward, data, run_path="runs/langgraph")
    print(trainer.train()["reward_mean"])
