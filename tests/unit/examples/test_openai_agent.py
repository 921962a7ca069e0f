"""The example with OpenAI's SDK: it calls its tools, answers, and its reward judges the answer."""

from typing import Any

from agentrl.inference.dialects.api_server import APIServer
from agentrl.plugins.integrations.agent_worker.engine_session import EngineReply, EngineSession
from agentrl.schema import GroundTruth, MCPTask
from examples.openai_agent import play, reward, use


async def test_the_agent_uses_its_tools_and_answers() -> None:
    replies = [
        EngineReply("", (("stock", '{"item": "honey"}'),)),
        EngineReply("", (("add", '{"a": 13, "b": 6}'), ("add", '{"a": 1}'))),
        EngineReply("<answer>19</answer>"),
    ]
    seen: list[list[Any]] = []

    async def model(messages: list[Any], tools: list[Any]) -> EngineReply:
        assert [tool["function"]["name"] for tool in tools] == ["stock", "add"]
        seen.append(messages)
        return replies[len(seen) - 1]

    task = MCPTask(id="t", query="honey: packs once 6 arrive?")
    async with (
        APIServer.open("127.0.0.1") as server,
        server.serve(EngineSession("policy", model)) as endpoint,
    ):
        assert await play(task, endpoint) == "<answer>19</answer>"
    results = [message["content"] for message in seen[-1] if message["role"] == "tool"]
    assert results == ["13", "19", "wrong call: KeyError: 'b'"]


def test_what_a_model_gets_wrong_is_told_to_it() -> None:
    assert use("stock", '{"item": "gold"}') == "wrong call: KeyError: 'gold'"
    assert use("add", "{").startswith("wrong call: JSONDecodeError")


def test_the_reward_is_for_the_right_number() -> None:
    truth = GroundTruth(query="q", answer=19)
    assert [reward(answer, truth) for answer in ("19", " 19\n", "20", "many")] == [1, 1, 0, 0]
