"""Images that an agent shows to the policy."""

import base64
from typing import Any

import openai
import pytest
from harness.scripted_engine import serve_script
from harness.tiny_tokenizer import write_seeing_tokenizer
from support.agents import LOOK, MODEL, assert_prompts_as_sent, client_of, open_stage
from support.play import begin_run, tool_call
from support.tool_server import picture

from agentrl.errors import AgentError
from agentrl.renderers import Renderer
from agentrl.rollout import RolloutResult
from agentrl.rollout.agent import AgentEndpoint
from agentrl.schema import MCPTask, rebuild_images
from agentrl.store import TrajectoryStore

TASK = MCPTask(id="train/0/q1", query="What is this?", answer="7")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.load(write_seeing_tokenizer(tmp_path_factory.mktemp("seeing")))


def url_of(number: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture(number)).decode()}"


def shown(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(number), "detail": "low"}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def test_images_are_stored_once_and_given_to_the_engine_in_their_order(
    store: TrajectoryStore, seeing: Renderer
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        messages: list[Any] = [{"role": "user", "content": [words(task.query), shown(1)]}]
        async with client_of(endpoint) as client:

            async def ask() -> Any:
                completion = await client.chat.completions.create(
                    model=endpoint.model, messages=messages, tools=[LOOK]
                )
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                return message

            (call,) = (await ask()).tool_calls
            result = [shown(2), words("a lamp")]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            await ask()
            # The same question about another picture is another conversation.
            messages[:] = [{"role": "user", "content": [words(task.query), shown(3)]}]
            await ask()
        return "7"

    script = [tool_call("look", key="lamp"), "It is a lamp.", "A rug."]
    with serve_script(seeing, lambda _: script.pop(0)) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            result, turns = await stage.play(agent)
    assert result == RolloutResult("answered", "7")
    assert [body["image_data"] for body in engine.requests] == [
        [url_of(1)],
        [url_of(1), url_of(2)],
        [url_of(3)],
    ]
    first, second, third = turns
    assert (second.parent, second.branch_reason, second.shared_images) == (0, None, 1)
    assert second.shared_len == len(first.added_ids) + len(first.output_ids)
    assert [(r.content, len(r.images)) for r in first.tool_results] == [("a lamp", 1)]
    assert second.added_messages == ()
    # Up to the image the ids agree, and from it on they mean another one.
    assert (third.branch_reason, third.shared_images) == ("fork", 0)
    place = engine.requests[2]["input_ids"].index(seeing.image_token_id)
    assert third.shared_len == place
    assert_prompts_as_sent(turns, [body["input_ids"] for body in engine.requests])
    assert len({address for images in rebuild_images(turns) for address in images}) == 3
    assert await store.database["blobs"].count_documents({"kind": "image"}) == 3


async def test_images_in_the_responses_form_are_seen_too(
    store: TrajectoryStore, seeing: Renderer
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        content: Any = [
            {"type": "input_text", "text": task.query},
            {"type": "input_image", "image_url": url_of(4), "detail": "auto"},
        ]
        async with client_of(endpoint) as client:
            response = await client.responses.create(
                model=endpoint.model, input=[{"role": "user", "content": content}]
            )
        return response.output_text

    with serve_script(seeing, lambda _: "<answer>7</answer>") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            result, _ = await stage.play(agent)
    assert result == RolloutResult("answered", "7")
    assert engine.requests[0]["image_data"] == [url_of(4)]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": [shown(1)]}], "the policy cannot see images"),
        ([{"role": "system", "content": [shown(1)]}], "only user and tool messages"),
        (
            [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}],
            "'file' is not supported",
        ),
        (
            [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}],
            "an image needs an image_url",
        ),
    ],
)
async def test_what_the_policy_cannot_see_is_refused_in_words(
    store: TrajectoryStore, renderer: Renderer, messages: Any, expected: str
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with client_of(endpoint) as client:
            with pytest.raises(openai.BadRequestError, match=expected) as caught:
                await client.chat.completions.create(model=MODEL, messages=messages)
        assert caught.value.code == "unsupported_content"
        return "7"

    with serve_script(renderer, lambda _: "hm") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            with pytest.raises(AgentError, match="without calling the policy"):
                await stage.play(agent)
