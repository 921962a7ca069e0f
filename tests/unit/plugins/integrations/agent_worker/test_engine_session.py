"""The endpoint through which an agent calls what a training engine samples with."""

from typing import Any

import openai
import pytest

from agentrl.errors import APIError
from agentrl.inference.dialects.api_server import APIServer
from agentrl.plugins.integrations.agent_worker.engine_session import EngineReply, EngineSession

USER = {"role": "user", "content": "How many?"}


async def test_the_endpoint_answers_each_rollout_at_its_own_address() -> None:
    seen: list[Any] = []

    async def answer(messages: list[Any], tools: list[Any]) -> EngineReply:
        seen.append((messages, tools))
        if len(seen) == 1:
            return EngineReply("", (("price", '{"item": "honey"}'),), 5, 3)
        if len(seen) == 3:
            raise APIError("no room is left", code="context_length_exceeded")
        return EngineReply("done")

    tool: Any = {"type": "function", "function": {"name": "price"}}
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]
    ask: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    async with APIServer.open("127.0.0.1") as server:
        session = EngineSession("m", answer)
        url = server.base_url(session)
        async with openai.AsyncOpenAI(base_url=url, api_key=session.key, max_retries=0) as client:
            create = client.chat.completions.create
            async with server.serve(session):
                first = await create(**ask, tools=[tool])
                frames = await create(**ask, stream=True)
                said = "".join([frame.choices[0].delta.content or "" async for frame in frames])
                with pytest.raises(openai.BadRequestError, match="no room is left"):
                    await create(**ask)
                with pytest.raises(
                    openai.BadRequestError, match=("describe the format in the prompt")
                ):
                    await create(**ask, response_format={"type": "json_object"})
            with pytest.raises(openai.NotFoundError, match="this rollout has ended"):
                await create(**ask)
    assert seen[0] == ([USER], [tool])
    assert first.choices[0].finish_reason == "tool_calls"
    calls = first.choices[0].message.tool_calls
    assert calls is not None
    (called,) = calls
    assert called.type == "function"
    assert (called.function.name, called.function.arguments) == ("price", '{"item": "honey"}')
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (5, 3)
    assert said == "done"
