"""Agents of other people's frameworks, as these ship, on a real model behind the embedded engine."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from agents import (
    Agent,
    FunctionTool,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    set_tracing_disabled,
)
from anthropic import AsyncAnthropic
from harness.processes import engine_process
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel, Field
from support.agents import assert_prompts_as_sent, client_of, open_stage
from support.engines import Oracle
from support.play import begin_run

from agentrl.config.sections import RolloutSection, SamplingSection
from agentrl.data import TokenTree
from agentrl.data.tokens import turn_tokens
from agentrl.renderers.renderer import Renderer
from agentrl.rollout.agent import AgentEndpoint, AgentFunction
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore

ROOT = Path(__file__).parents[2]
MODEL_DIR = ROOT / "assets/demo/model"
sys.path.append(str(ROOT))

from examples.shop import server as shop  # noqa: E402

MAX_STEPS = 6
CATALOGUE = shop.CATALOGUE
SCHEMAS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": shape.name,
            "description": shape.description,
            "parameters": shape.input_schema,
        },
    }
    for shape in shop.TOOLS.values()
]


def use(name: str, arguments: Mapping[str, Any]) -> str:
    """What the shop says; the policy's mistakes are for it to read."""
    try:
        return shop.call_tool(CATALOGUE, name, arguments)
    except shop.ToolInputError as error:
        return str(error)


def openai_sdk(*, stream: bool) -> AgentFunction:
    async def play(task: MCPTask, endpoint: AgentEndpoint) -> str:
        messages: list[Any] = [{"role": "user", "content": task.query}]
        async with client_of(endpoint) as client:
            for _ in range(MAX_STEPS):
                ask: dict[str, Any] = {"messages": messages, "tools": SCHEMAS}
                if stream:
                    async with client.chat.completions.stream(
                        model=endpoint.model, **ask
                    ) as events:
                        completion: Any = await events.get_final_completion()
                else:
                    completion = await client.chat.completions.create(model=endpoint.model, **ask)
                message = completion.choices[0].message
                if not message.tool_calls:
                    return message.content or ""
                messages.append(message)
                for call in message.tool_calls:
                    result = use(call.function.name, json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return ""

    return play


def agents_sdk(model_class: Callable[..., Any], *, stream: bool = False) -> AgentFunction:
    def tool(shape: shop.ToolShape) -> FunctionTool:
        async def invoke(_: Any, arguments: str) -> str:
            return use(shape.name, json.loads(arguments))

        return FunctionTool(
            name=shape.name,
            description=shape.description,
            params_json_schema=dict(shape.input_schema),
            on_invoke_tool=invoke,
            strict_json_schema=False,
        )

    async def play(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with client_of(endpoint) as client:
            agent = Agent(
                name="shopper",
                model=model_class(model=endpoint.model, openai_client=client),
                tools=[tool(shape) for shape in shop.TOOLS.values()],
            )
            if stream:
                streamed = Runner.run_streamed(agent, task.query, max_turns=MAX_STEPS)
                async for _ in streamed.stream_events():
                    pass
                return str(streamed.final_output)
            return str((await Runner.run(agent, task.query, max_turns=MAX_STEPS)).final_output)

    return play


def last_reply(state: MessagesState) -> AIMessage:
    message = state["messages"][-1]
    assert isinstance(message, AIMessage)
    return message


def anthropic_sdk(*, stream: bool) -> AgentFunction:
    tools: list[Any] = [
        {
            "name": shape.name,
            "description": shape.description,
            "input_schema": dict(shape.input_schema),
        }
        for shape in shop.TOOLS.values()
    ]

    async def play(task: MCPTask, endpoint: AgentEndpoint) -> str:
        messages: list[Any] = [{"role": "user", "content": task.query}]
        async with AsyncAnthropic(
            base_url=endpoint.anthropic_base_url, api_key=endpoint.api_key
        ) as client:
            for _ in range(MAX_STEPS):
                ask: dict[str, Any] = {"messages": messages, "tools": tools, "max_tokens": 48}
                if stream:
                    async with client.messages.stream(model=endpoint.model, **ask) as events:
                        reply: Any = await events.get_final_message()
                else:
                    reply = await client.messages.create(model=endpoint.model, **ask)
                calls = [block for block in reply.content if block.type == "tool_use"]
                if not calls:
                    return "".join(block.text for block in reply.content if block.type == "text")
                results = [
                    {
                        "type": "tool_result",
                        "tool_use_id": call.id,
                        "content": use(call.name, call.input),
                    }
                    for call in calls
                ]
                messages += [
                    {"role": "assistant", "content": reply.content},
                    {"role": "user", "content": results},
                ]
        return ""

    return play


def langgraph() -> AgentFunction:
    async def play(task: MCPTask, endpoint: AgentEndpoint) -> str:
        model = ChatOpenAI(
            model=endpoint.model, base_url=endpoint.base_url, api_key=endpoint.api_key
        ).bind_tools(SCHEMAS)

        async def think(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await model.ainvoke(state["messages"])]}

        def act(state: MessagesState) -> dict[str, Any]:
            return {
                "messages": [
                    ToolMessage(use(call["name"], call["args"]), tool_call_id=call["id"])
                    for call in last_reply(state).tool_calls
                ]
            }

        def after(state: MessagesState) -> str:
            return "act" if last_reply(state).tool_calls else END

        graph = StateGraph(MessagesState)
        graph.add_node("think", think)
        graph.add_node("act", act)
        graph.add_edge(START, "think")
        graph.add_conditional_edges("think", after, ["act", END])
        graph.add_edge("act", "think")
        state = await graph.compile().ainvoke(
            {"messages": [HumanMessage(task.query)]}, {"recursion_limit": 2 * MAX_STEPS}
        )
        return str(state["messages"][-1].content)

    return play


@dataclass(frozen=True)
class Engine:
    """The embedded engine, and what it was asked."""

    renderer: Renderer
    base_url: str
    log: Path

    def num_requests(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def prompts_since(self, start: int) -> list[list[int]]:
        lines = self.log.read_text().splitlines()[start:]
        return [json.loads(line)["input_ids"] for line in lines]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("engine") / "requests.jsonl"
    with engine_process(MODEL_DIR, "--log-requests", str(log)) as url:
        yield Engine(Renderer.load(MODEL_DIR), url, log)


@pytest.mark.parametrize(
    "agent",
    [
        pytest.param(openai_sdk(stream=False), id="openai"),
        pytest.param(openai_sdk(stream=True), id="openai-streaming"),
        pytest.param(agents_sdk(OpenAIResponsesModel), id="agents-responses"),
        pytest.param(agents_sdk(OpenAIResponsesModel, stream=True), id="agents-streaming"),
        pytest.param(agents_sdk(OpenAIChatCompletionsModel), id="agents-chat"),
        pytest.param(anthropic_sdk(stream=False), id="anthropic"),
        pytest.param(anthropic_sdk(stream=True), id="anthropic-streaming"),
        pytest.param(langgraph(), id="langgraph"),
    ],
)
async def test_an_unchanged_agents_rollouts_are_recorded_token_for_token_and_can_be_trained_on(
    store: TrajectoryStore, engine: Engine, agent: AgentFunction
) -> None:
    set_tracing_disabled(True)
    tries = 4
    before = engine.num_requests()
    task = MCPTask(
        id="train/0/q",
        query="candles: how many if we buy 7?",
        answer="55",
        num_generations=tries,
    )
    await begin_run(store, engine, task)
    sampling = SamplingSection(max_new_tokens=48)
    rollout = RolloutSection(max_turns=MAX_STEPS)
    async with open_stage(store, engine, sampling=sampling, rollout=rollout) as stage:
        played = await asyncio.gather(*(stage.play(agent) for _ in range(tries)))
    turns = [turn for _, of_record in played for turn in of_record]
    prompts = engine.prompts_since(before)
    for _, of_record in played:
        assert [turn.parent for turn in of_record] == [None, *range(len(of_record) - 1)]
        assert {turn.branch_reason for turn in of_record} == {None}
    assert_prompts_as_sent_by_any(played, prompts)
    # The model knows this shop: it uses the tools and reads what they say.
    assert any(result.outcome == "answered" for result, _ in played)
    assert sum(len(turn.tool_results) for turn in turns) >= tries
    assert_trainable(turns)


async def test_a_stop_text_ends_a_reply_and_stays_in_the_tokens(
    store: TrajectoryStore, engine: Engine
) -> None:
    replies: list[Any] = []

    async def play(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with client_of(endpoint) as client:
            completion = await client.chat.completions.create(
                model=endpoint.model,
                messages=[{"role": "user", "content": task.query}],
                tools=SCHEMAS,
                tool_choice="none",
                stop=["arguments"],
                temperature=0,
            )
        replies.append(completion.choices[0])
        return "55"

    task = MCPTask(id="train/0/q", query="candles: how many if we buy 7?", answer="55")
    await begin_run(store, engine, task)
    async with open_stage(store, engine, sampling=SamplingSection(max_new_tokens=48)) as stage:
        _, (turn,) = await stage.play(play)
    (choice,) = replies
    assert choice.finish_reason == "stop"
    assert choice.message.content == turn.output_text.partition("arguments")[0]
    assert "arguments" in turn.output_text
    assert turn.finish_reason == "stop"


class Order(BaseModel):
    item: Literal["candles", "lamps"]
    amount: int = Field(ge=0, le=99)


ORDER = "candles: how many if we buy 7?"


async def order_by_openai(endpoint: AgentEndpoint) -> Order | None:
    async with client_of(endpoint) as client:
        completion = await client.chat.completions.parse(
            model=endpoint.model,
            messages=[{"role": "user", "content": ORDER}],
            response_format=Order,
        )
    return completion.choices[0].message.parsed


async def order_by_responses(endpoint: AgentEndpoint) -> Order | None:
    async with client_of(endpoint) as client:
        response = await client.responses.parse(
            model=endpoint.model, input=ORDER, text_format=Order
        )
    return response.output_parsed


def order_by_agents_sdk(model_class: Callable[..., Any]) -> Callable[..., Any]:
    async def order(endpoint: AgentEndpoint) -> Order:
        async with client_of(endpoint) as client:
            model = model_class(model=endpoint.model, openai_client=client)
            agent = Agent(name="clerk", model=model, output_type=Order)
            order = (await Runner.run(agent, ORDER)).final_output
            assert isinstance(order, Order)
            return order

    return order


async def order_by_langgraph(endpoint: AgentEndpoint) -> Order:
    model = ChatOpenAI(
        model=endpoint.model, base_url=endpoint.base_url, api_key=endpoint.api_key
    ).with_structured_output(Order)

    async def think(state: MessagesState) -> dict[str, Any]:
        order = await model.ainvoke(state["messages"])
        assert isinstance(order, Order)
        return {"messages": [AIMessage(order.model_dump_json())]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_edge(START, "think")
    state = await graph.compile().ainvoke({"messages": [HumanMessage(ORDER)]})
    return Order.model_validate_json(state["messages"][-1].content)


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(order_by_openai, id="openai"),
        pytest.param(order_by_responses, id="openai-responses", marks=pytest.mark.slow),
        pytest.param(
            order_by_agents_sdk(OpenAIResponsesModel),
            id="agents-responses",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            order_by_agents_sdk(OpenAIChatCompletionsModel),
            id="agents-chat",
            marks=pytest.mark.slow,
        ),
        pytest.param(order_by_langgraph, id="langgraph", marks=pytest.mark.slow),
    ],
)
async def test_a_frameworks_structured_output_is_what_a_real_policy_was_held_to(
    store: TrajectoryStore, engine: Engine, ask: Callable[[AgentEndpoint], Any]
) -> None:
    set_tracing_disabled(True)
    orders: list[Any] = []

    async def play(task: MCPTask, endpoint: AgentEndpoint) -> str:
        orders.append(await ask(endpoint))
        return "55"

    # The model was never taught to write this; its tokens that are no JSON are not drawn.
    await begin_run(store, engine, MCPTask(id="train/0/q", query=ORDER, answer="55"))
    async with open_stage(store, engine, sampling=SamplingSection(max_new_tokens=600)) as stage:
        result, (turn,) = await stage.play(play)
    assert result.outcome == "answered"
    assert isinstance(orders[0], Order)
    (tokens,) = turn_tokens([turn])
    alone = Oracle().logprobs(MODEL_DIR, tokens.prompt_ids, tokens.output_ids)
    ratios = np.exp(alone - tokens.behavior_logprobs)
    # The share of the model's own probability that was allowed: none is above 1.
    assert ratios.max() <= 1.0 + 1e-3
    assert ratios.min() < 0.5


def assert_prompts_as_sent_by_any(played: list[Any], prompts: list[list[int]]) -> None:
    left = [tuple(ids) for ids in prompts]
    for _, of_record in played:
        assert_prompts_as_sent(of_record, take(left, of_record))
    assert left == []


def take(left: list[tuple[int, ...]], turns: list[Any]) -> list[tuple[int, ...]]:
    """Take a record's prompts out of those of all records."""
    taken = []
    for tokens in turn_tokens(turns):
        prompt = tuple(tokens.prompt_ids.tolist())
        left.remove(prompt)
        taken.append(prompt)
    return taken


def assert_trainable(turns: list[Any]) -> None:
    """The turns make a tree, and the model gives their tokens the logprobs that were recorded."""
    tree = TokenTree.from_turns(turns)
    assert tree.num_targets == sum(len(turn.output_ids) for turn in turns)
    assert tree.num_tokens < tree.num_flat_tokens
    oracle = Oracle()
    for tokens in turn_tokens(turns)[:4]:
        logprobs = oracle.logprobs(
            MODEL_DIR, tokens.prompt_ids, tokens.output_ids, tokens.temperature
        )
        np.testing.assert_allclose(logprobs, tokens.behavior_logprobs, atol=1e-4)
