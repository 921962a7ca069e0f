"""Replies that must be JSON of a schema."""

import json
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from harness.scripted_engine import serve_script
from harness.tiny_tokenizer import CHAT_TEMPLATE, write_tokenizer
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response
from support.agents import LOOK, MODEL, client_of, open_stage
from support.play import begin_run, tool_call
from support.stub_server import generation, stub_server

from agentrl.config.sections import RolloutSection
from agentrl.errors import AgentError, RenderError
from agentrl.renderers import Renderer
from agentrl.rollout import RolloutResult
from agentrl.rollout.agent import AgentEndpoint
from agentrl.schema import MCPTask
from agentrl.schema.grammar import StructuralTag
from agentrl.store import TrajectoryStore

TASK = MCPTask(id="train/0/q1", query="What does the lamp cost?", answer="7")


class Price(BaseModel):
    coins: int
    kind: Literal["lamp", "candle"]


REPLY = '{"coins": 7, "kind": "lamp"}'
EXPECTED = Price(coins=7, kind="lamp")


async def by_chat(client: openai.AsyncOpenAI) -> Price | None:
    completion = await client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "?"}], response_format=Price
    )
    return completion.choices[0].message.parsed


async def by_chat_stream(client: openai.AsyncOpenAI) -> Price | None:
    async with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "?"}], response_format=Price
    ) as events:
        completion = await events.get_final_completion()
    return completion.choices[0].message.parsed


async def by_responses(client: openai.AsyncOpenAI) -> Price | None:
    response = await client.responses.parse(model=MODEL, input="?", text_format=Price)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    return response.output_parsed


@pytest.mark.parametrize("ask", [by_chat, by_chat_stream, by_responses])
async def test_a_reply_asked_for_by_schema_is_held_to_it_and_parsed_by_openais_client(
    store: TrajectoryStore, renderer: Renderer, ask: Any
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with client_of(endpoint) as client:
            assert await ask(client) == EXPECTED
        return "7"

    with serve_script(renderer, lambda _: f"<think>{{}}?</think>\n\n{REPLY}") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            _, (turn,) = await stage.play(agent)
    params = engine.requests[0]["sampling_params"]
    assert json.loads(params["json_schema"])["required"] == ["coins", "kind"]
    # What the behavior logprobs are of can be read from the turn.
    assert turn.sampling_params.grammar is not None
    assert turn.sampling_params.grammar.text == params["json_schema"]


async def test_a_reply_that_may_call_tools_is_json_or_a_call(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    schema = {"name": "price", "schema": Price.model_json_schema()}

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        messages: list[Any] = [{"role": "user", "content": "?"}]
        ask: dict[str, Any] = {
            "model": MODEL,
            "messages": messages,
            "tools": [LOOK],
            "response_format": {"type": "json_schema", "json_schema": schema},
        }
        async with client_of(endpoint) as client:
            first = await client.chat.completions.create(**ask)
            calls = first.choices[0].message.tool_calls
            assert calls is not None
            (call,) = calls
            messages.append(first.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
            second = await client.chat.completions.create(**ask)
            await client.chat.completions.create(**ask | {"tool_choice": "required"})
        return second.choices[0].message.content or ""

    def script(prompt: str) -> str:
        return REPLY if "<tool_response>" in prompt else tool_call("look", key="lamp")

    with serve_script(renderer, script) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            result, turns = await stage.play(agent)
    assert result == RolloutResult("answered", REPLY)
    assert [turn.parent for turn in turns[:2]] == [None, 0]
    params = [body["sampling_params"] for body in engine.requests]
    form = StructuralTag.model_validate_json(params[0]["structural_tag"]).model_dump()
    answer, call = form["format"]["elements"]
    assert answer["type"] == "json_schema"
    assert call["elements"][0]["value"] == "<tool_call>"
    # A call that has to be made is begun for the policy instead.
    assert "structural_tag" not in params[2]


@pytest.mark.parametrize(
    ("response_format", "message"),
    [
        ({"type": "grammar"}, "unknown type 'grammar'; use text, json_object or json_schema"),
        ({"type": "json_schema"}, "response_format.json_schema.schema: must be a JSON schema"),
        ({"type": "json_schema", "json_schema": {"schema": []}}, "must be a JSON schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "strng"}}},
            "response_format: type: 'strng' is not valid",
        ),
    ],
)
async def test_a_form_that_cannot_be_had_is_refused_in_one_line(
    store: TrajectoryStore, renderer: Renderer, response_format: Any, message: str
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with client_of(endpoint) as client:
            with pytest.raises(openai.BadRequestError, match=message) as caught:
                await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": "?"}],
                    response_format=response_format,
                )
        assert isinstance(caught.value.body, dict)
        assert "\n" not in caught.value.body["message"]
        return "7"

    with serve_script(renderer, lambda _: REPLY) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            with pytest.raises(AgentError, match="the endpoint refused a call"):
                await stage.play(agent)
    assert await store.database["turns"].count_documents({}) == 0


async def test_a_schema_that_a_server_cannot_compile_is_the_agents_mistake_and_takes_no_turn(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    async def picky(body: dict[str, Any]) -> Response:
        if "json_schema" in body["sampling_params"]:
            problem = {"message": "Failed to compile json grammar: no 'not'\n"}
            return JSONResponse({"error": problem}, 400)
        return JSONResponse(generation([*b"ok", renderer.stop_token_ids[0]]))

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        ask: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "?"}]}
        schema = {"name": "x", "schema": {"not": {"type": "string"}}}
        hard: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": schema}}
        async with client_of(endpoint) as client:
            with pytest.raises(
                openai.BadRequestError, match="replies cannot be constrained"
            ) as caught:
                await client.chat.completions.create(**ask, **hard)
            assert caught.value.code == "invalid_json_schema"
            await client.chat.completions.create(**ask)
        return "7"

    with serve_script(renderer, lambda _: REPLY) as engine:
        async with stub_server(picky) as stub:
            engine.base_url = stub.url
            await begin_run(store, engine, TASK)
            rollout = RolloutSection(max_turns=1)
            async with open_stage(store, engine, rollout=rollout) as stage:
                result, turns = await stage.play(agent)
    assert result == RolloutResult("answered", "7")
    assert len(turns) == 1


def test_a_grammar_says_what_the_models_own_template_leaves_open(tmp_path: Path) -> None:
    opens = CHAT_TEMPLATE.replace(
        "<|im_start|>assistant\\n'", "<|im_start|>assistant\\n<think>\\n'"
    )
    closed = CHAT_TEMPLATE.replace(
        "<|im_start|>assistant\\n'", "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n'"
    )
    begun = Renderer.load(write_tokenizer(tmp_path / "opens", opens)).json_grammar({})
    tag = StructuralTag.model_validate_json(begun.text).model_dump()
    assert [tag["format"]["elements"][0][name] for name in ("begin", "end")] == ["", "</think>"]
    either = CHAT_TEMPLATE + "{# <think> #}"
    optional = Renderer.load(write_tokenizer(tmp_path / "either", either)).json_grammar({})
    tag = StructuralTag.model_validate_json(optional.text).model_dump()
    assert tag["format"]["elements"][0]["type"] == "optional"
    plain = Renderer.load(write_tokenizer(tmp_path / "closed", closed))
    grammar = plain.json_grammar({"type": "object"})
    assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", {"type": "object"})
    other = Renderer.load(tmp_path / "closed", tool_call_parser="mistral")
    with pytest.raises(RenderError, match="omit response_format"):
        other.json_grammar({}, may_call=True)
