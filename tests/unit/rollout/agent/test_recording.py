"""OpenAI's own client against the agent endpoint, before an engine that keeps what it was sent."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from harness.scripted_engine import ScriptedEngine, replies, serve_script
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from support.agents import LOOK, MODEL, assert_prompts_as_sent, client_of, open_stage
from support.play import begin_run, service, tool_call

from agentrl.config.sections import AgentSection, RolloutSection, SamplingSection
from agentrl.errors import AgentError
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import RolloutResult
from agentrl.rollout.agent import AgentEndpoint
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore

TASK = MCPTask(id="train/0/q1", query="What does the lamp cost?", num_generations=2, answer="7")
CALL = f"<think>look it up</think>Let me see.\n{tool_call('look', key='lamp')}"
ANSWER = "<answer>7</answer>"


def sent(engine: ScriptedEngine) -> list[list[int]]:
    return [body["input_ids"] for body in engine.requests]


def as_it_is(message: dict[str, Any]) -> dict[str, Any]:
    return message


def as_another_framework_would(message: dict[str, Any]) -> dict[str, Any]:
    """No thinking, ids of its own, other spaces in the arguments, no words beside the calls."""
    calls = [
        {
            "id": f"own-{position}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(json.loads(call["function"]["arguments"]), indent=4),
            },
        }
        for position, call in enumerate(message["tool_calls"])
    ]
    return {
        "role": "assistant",
        "content": [{"type": "text", "text": "Let me see."}],
        "tool_calls": calls,
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("send_back", [as_it_is, as_another_framework_would])
async def test_the_next_call_continues_the_sampled_tokens_however_the_reply_is_sent_back(
    store: TrajectoryStore,
    renderer: Renderer,
    stream: bool,
    send_back: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        messages: list[Any] = [{"role": "user", "content": task.query}]
        async with client_of(endpoint) as client:
            while True:
                ask: dict[str, Any] = {
                    "model": endpoint.model,
                    "messages": messages,
                    "tools": [LOOK],
                }
                if stream:
                    async with client.chat.completions.stream(**ask) as events:
                        completion = await events.get_final_completion()
                else:
                    completion = await client.chat.completions.create(**ask)
                choice = completion.choices[0]
                if not choice.message.tool_calls:
                    assert choice.finish_reason == "stop"
                    return choice.message.content or ""
                assert choice.finish_reason == "tool_calls"
                reply = send_back(choice.message.model_dump(exclude_none=True))
                call = reply["tool_calls"][0]
                assert json.loads(call["function"]["arguments"]) == {"key": "lamp"}
                messages += [
                    reply,
                    {"role": "tool", "tool_call_id": call["id"], "content": "7 coins"},
                ]

    with serve_script(renderer, replies(CALL, ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            result, turns = await stage.play(agent)
    assert result == RolloutResult("answered", "7")
    first, second = turns
    assert (first.parent, second.parent, second.branch_reason) == (None, 0, None)
    assert second.shared_len == len(sent(engine)[0]) + len(first.output_ids)
    assert [(r.call_id, r.name, r.content) for r in first.tool_results] == [
        (first.tool_calls[0].id, "look", "7 coins")
    ]
    assert second.added_messages == ()
    assert [tool["function"]["name"] for tool in first.tools] == ["look"]
    assert_prompts_as_sent(turns, sent(engine))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engines_ids_are_answered_where_they_are_asked_for(
    store: TrajectoryStore, renderer: Renderer, stream: bool
) -> None:
    choices: list[dict[str, Any]] = []

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": task.query}]}
        more = {"return_token_ids": True}
        async with client_of(endpoint) as client:
            if stream:
                chunks = await client.chat.completions.create(**asked, stream=True, extra_body=more)
                choices.extend([chunk.choices[0].model_dump() async for chunk in chunks])
            else:
                whole = await client.chat.completions.create(**asked, extra_body=more)
                choices.append(whole.choices[0].model_dump())
                assert whole.model_dump()["prompt_token_ids"] == choices[0]["prompt_token_ids"]
        return "7"

    with serve_script(renderer, replies(ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            _, (turn,) = await stage.play(agent)
    assert choices[-1]["prompt_token_ids"] == sent(engine)[0]
    assert choices[-1]["token_ids"] == turn.output_ids.tolist()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
async def test_the_responses_form_continues_the_sampled_tokens_too(
    store: TrajectoryStore, renderer: Renderer, stream: bool, by_id: bool
) -> None:
    tool: dict[str, Any] = {"type": "function", "strict": False, **LOOK["function"]}

    async def respond(client: openai.AsyncOpenAI, **ask: Any) -> Any:
        ask |= {"instructions": "Be brief.", "tools": [tool]}
        if not stream:
            return await client.responses.create(**ask)
        async with client.responses.stream(**ask) as events:
            async for _ in events:
                pass
            return await events.get_final_response()

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with client_of(endpoint) as client:
            items: list[Any] = [{"role": "user", "content": task.query}]
            first = await respond(client, model=endpoint.model, input=items)
            kinds = [item.type for item in first.output]
            assert kinds == ["reasoning", "message", "function_call"]
            call = first.output[-1]
            assert json.loads(call.arguments) == {"key": "lamp"}
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
            more: dict[str, Any] = {"input": [*items, *first.output, result]}
            if by_id:
                more = {"input": [result], "previous_response_id": first.id}
            second = await respond(client, model=endpoint.model, **more)
            assert (second.status, second.usage.input_tokens) == ("completed", len(sent(engine)[1]))
            return str(second.output_text)

    with serve_script(renderer, replies(CALL, ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            result, turns = await stage.play(agent)
    assert result == RolloutResult("answered", "7")
    assert [(turn.parent, turn.branch_reason) for turn in turns] == [(None, None), (0, None)]
    assert [r.content for r in turns[0].tool_results] == ["7"]
    assert_prompts_as_sent(turns, sent(engine))


async def test_parallel_calls_and_edited_contexts_branch_where_their_tokens_part(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    def script(prompt: str) -> str:
        return f"noted {len(prompt)}"

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        system = {"role": "system", "content": "You plan. " * 20}
        async with client_of(endpoint) as client:

            async def ask(*messages: Any) -> Any:
                completion = await client.chat.completions.create(
                    model=endpoint.model, messages=list(messages)
                )
                return {"role": "assistant", "content": completion.choices[0].message.content or ""}

            question = {"role": "user", "content": task.query}
            plan = await ask(system, question)
            subtasks = [{"role": "user", "content": f"Do part {n}."} for n in range(3)]
            parts = await asyncio.gather(*(ask(system, question, plan, s) for s in subtasks))
            helper = {"role": "system", "content": "You criticise."}
            await ask(helper, question)
            # Its own context, with the plan left out and the parts written anew.
            await ask(system, question, {"role": "user", "content": "Sum up."})
            again = {"role": "user", "content": "And again."}
            await ask(system, question, plan, subtasks[1], parts[1], again)
            return "7"

    with serve_script(renderer, script) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine, rollout=RolloutSection(max_turns=9)) as stage:
            result, turns = await stage.play(agent)
    assert result == RolloutResult("answered", "7")
    assert [turn.branch_reason for turn in turns] == [None, None, None, None, "fork", "fork", None]
    assert [turn.parent for turn in turns[:4]] == [None, 0, 0, 0]
    full = len(turns[0].added_ids) + len(turns[0].output_ids)
    assert [turn.shared_len for turn in turns[1:4]] == [full] * 3
    assert 0 < turns[4].shared_len < 40
    assert turns[6].parent in (1, 2, 3)
    assert [m["content"] for m in turns[6].added_messages] == ["And again."]
    assert [m["content"] for m in turns[5].added_messages][-1] == "Sum up."
    assert len({turn.sampling_params.seed for turn in turns}) == len(turns)
    assert_prompts_as_sent(turns, sent(engine))


async def test_a_context_with_old_results_taken_out_shares_what_is_left(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        messages: list[Any] = [{"role": "user", "content": task.query}]
        async with client_of(endpoint) as client:
            for step in range(3):
                if step == 2:  # forgets what its first call said
                    messages[2]["content"] = "(removed)"
                completion = await client.chat.completions.create(
                    model=endpoint.model, messages=messages, tools=[LOOK]
                )
                reply = completion.choices[0].message.model_dump(exclude_none=True)
                del reply["reasoning_content"]
                messages.append(reply)
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": f"{step} coins"}
                    for call in reply["tool_calls"]
                ]
        return "7"

    with serve_script(renderer, lambda prompt: CALL) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            _, turns = await stage.play(agent)
    third = turns[2]
    assert (third.parent, third.branch_reason) == (0, None)
    first_path = len(turns[0].added_ids) + len(turns[0].output_ids)
    assert first_path <= third.shared_len
    text = renderer.decode(sent(engine)[2])
    assert "(removed)" in text
    assert "0 coins" not in text
    assert "1 coins" in text
    assert text.count("<think>look it up</think>") == 2
    assert_prompts_as_sent(turns, sent(engine))


async def test_two_rollouts_at_once_keep_their_calls_apart(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        messages: list[Any] = [{"role": "user", "content": task.query}]
        # Without a path of its own, the key says whose call it is.
        shared = endpoint.base_url.partition("/s/")[0] + "/v1"
        for url in (endpoint.base_url, shared):
            async with openai.AsyncOpenAI(base_url=url, api_key=endpoint.api_key) as client:
                completion = await client.chat.completions.create(
                    model=endpoint.model, messages=messages
                )
            messages += [
                {"role": "assistant", "content": completion.choices[0].message.content},
                {"role": "user", "content": "go on"},
            ]
        return "7"

    with serve_script(renderer, lambda prompt: "hm", delay_seconds=0.05) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            played = await asyncio.gather(*(stage.play(agent) for _ in range(2)))
    records = {turn.record_id for _, turns in played for turn in turns}
    assert records == {"train/0/q1/0", "train/0/q1/1"}
    for _, turns in played:
        assert [(turn.parent, turn.branch_reason) for turn in turns] == [(None, None), (0, None)]
        assert len({turn.record_id for turn in turns}) == 1


async def test_what_the_agent_asks_for_is_how_tokens_are_drawn_unless_the_run_decides(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with client_of(endpoint) as client:
            completion = await client.chat.completions.create(
                model=endpoint.model,
                messages=[{"role": "user", "content": "Count."}],
                temperature=0.5,
                top_p=0.9,
                seed=3,
                max_tokens=1000,
                stop=["three"],
                logprobs=True,
                extra_body={"top_k": 20},
            )
        choice = completion.choices[0]
        assert choice.message.content == "one two "
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert "".join(token.token for token in content) == "one two three four<|im_end|>"
        assert {token.logprob for token in content} == {-0.5}
        return "7"

    drawn = []
    for who in ("agent", "run"):
        with serve_script(renderer, lambda prompt: "one two three four") as engine:
            if who == "agent":
                await begin_run(store, engine, TASK)
            else:
                await store.services.register(service(engine))
            section = AgentSection(agent_sampling=who)
            async with open_stage(store, engine, agents=section) as stage:
                await stage.play(agent)
        drawn.append(engine.requests[0]["sampling_params"])
    by_agent, by_run = drawn
    names = ("temperature", "top_p", "top_k", "max_new_tokens", "stop")
    assert [by_agent[name] for name in names] == [0.5, 0.9, 20, 200, ["three"]]
    assert [by_run[name] for name in names] == [1.0, 1.0, -1, 200, ["three"]]
    assert by_agent["sampling_seed"] == 3
    assert by_run["sampling_seed"] != 3


async def test_a_malformed_call_reaches_the_agent_as_text_and_earns_nothing(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    broken = '<think>hm</think><tool_call>\n{"name": "look", "arguments": {"key": \n</tool_call>'

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with client_of(endpoint) as client:
            completion = await client.chat.completions.create(
                model=endpoint.model, messages=[{"role": "user", "content": "x"}], tools=[LOOK]
            )
        message = completion.choices[0].message
        assert message.tool_calls is None
        assert message.content == broken.partition("</think>")[2]
        return "7"

    with serve_script(renderer, lambda prompt: broken) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            _, turns = await stage.play(agent)
    assert turns[0].advantage == 0.0


async def test_texts_and_token_ids_are_completed_and_continued(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with client_of(endpoint) as client:
            prompt = "One, <|im_end|> "
            first = await client.completions.create(model=endpoint.model, prompt=prompt, logprobs=1)
            choice = first.choices[0]
            assert choice.logprobs is not None
            assert choice.logprobs.tokens == ["t", "w", "o", "<|im_end|>"]
            text = prompt + choice.text + ", and "
            frames = await client.completions.create(model=endpoint.model, prompt=text, stream=True)
            streamed = [frame async for frame in frames]
            assert "".join(frame.choices[0].text for frame in streamed) == "two"
            await client.completions.create(model=endpoint.model, prompt=[5, 6, 7])
        return "7"

    with serve_script(renderer, lambda prompt: "two") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            _, turns = await stage.play(agent)
    assert [turn.parent for turn in turns] == [None, 0, None]
    assert not renderer.control_token_ids.intersection(sent(engine)[0])
    # The text of a reply does not show its end token, and so neither does what goes on from it.
    kept = len(sent(engine)[0]) + len(turns[0].output_ids) - 1
    assert (turns[1].shared_len, turns[1].branch_reason) == (kept, "stop_token")
    assert sent(engine)[2] == [5, 6, 7]
    assert_prompts_as_sent(turns, sent(engine))


async def test_vllms_clients_send_and_get_token_ids(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    answers: list[dict[str, Any]] = []

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        url = f"{endpoint.base_url.removesuffix('/v1')}/inference/v1/generate"
        key = {"Authorization": f"Bearer {endpoint.api_key}"}
        drawn = {"max_tokens": 20, "logprobs": 1, "temperature": 0.7, "min_tokens": 0}
        ids = renderer.encode("One, ").tolist()
        async with httpx.AsyncClient(trust_env=False, headers=key) as client:
            added: list[list[int]] = [[], renderer.encode(" and ").tolist()]
            for more in added:
                ids += more
                body = {"token_ids": ids, "sampling_params": drawn, "request_id": "mine"}
                answers.append((await client.post(url, json=body)).json())
                ids += answers[-1]["choices"][0]["token_ids"]
            wrong: list[dict[str, Any]] = [
                {"stream": True},
                {"token_ids": [True]},
                {"token_ids": []},
                {"features": {"mm": 1}},
                {"sampling_params": {"ignore_eos": True}},
                {"sampling_params": {"stop_token_ids": [5]}},
                {"sampling_params": {"n": 2}},
                {"sampling_params": {"logprobs": 5}},
                {"sampling_params": {"temperature": "hot"}},
                {"token_ids": [5] * 1_000_000},
            ]
            refused = [await client.post(url, json={"token_ids": [5], **one}) for one in wrong]
        assert [answer.status_code for answer in refused] == [400] * len(refused)
        params = [answer.json()["error"]["param"] for answer in refused]
        assert params == [
            *("stream", "token_ids.0", "token_ids", "features", "sampling_params.ignore_eos"),
            *("sampling_params.stop_token_ids", "sampling_params.n", "sampling_params.logprobs"),
            *("sampling_params.temperature", None),
        ]
        # In the words by which clients know that they have to shorten the prompt.
        last = refused[-1].json()["error"]["message"]
        assert re.search(r"this model's maximum context length is \d+ tokens", last)
        return "7"

    with serve_script(renderer, lambda prompt: "two") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            _, turns = await stage.play(agent)
    for answer, turn in zip(answers, turns, strict=True):
        (choice,) = answer["choices"]
        assert answer["request_id"] == "mine"
        assert choice["token_ids"] == turn.output_ids.tolist()
        logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
        assert logprobs == turn.output_logprobs.tolist()
    assert (turns[1].parent, turns[1].branch_reason) == (0, None)
    assert turns[1].shared_len == len(sent(engine)[0]) + len(turns[0].output_ids)
    assert_prompts_as_sent(turns, sent(engine))


@pytest.mark.parametrize(
    ("more", "status", "code", "param"),
    [
        ({"n": 2}, 400, "unsupported_value", "n"),
        ({"top_logprobs": 3}, 400, "unsupported_value", "top_logprobs"),
        ({"response_format": {"type": "xml"}}, 400, "unsupported_value", "response_format"),
        ({"temperature": 9}, 400, None, "temperature"),
        ({"messages": []}, 400, None, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, 400, None, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "unsupported_content",
            "messages[0]",
        ),
        ({"model": "gpt-9"}, 404, "model_not_found", "model"),
        (
            {"messages": [{"role": "user", "content": "long " * 200}]},
            400,
            "context_length_exceeded",
            None,
        ),
    ],
)
async def test_what_cannot_be_had_is_refused_in_openais_shape(
    store: TrajectoryStore,
    renderer: Renderer,
    more: dict[str, Any],
    status: int,
    code: str | None,
    param: str | None,
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        ask: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        async with client_of(endpoint) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(**(ask | more))
            error = caught.value
            assert (error.status_code, error.code, error.param) == (status, code, param)
            # A refusal is the agent's to deal with: it may go on.
            await client.chat.completions.create(**ask)
        return "7"

    with serve_script(renderer, lambda prompt: "hm") as engine:
        await begin_run(store, engine, TASK)
        sampling = SamplingSection(max_prompt_tokens=500, max_new_tokens=50)
        async with open_stage(store, engine, sampling=sampling) as stage:
            result, turns = await stage.play(agent)
    assert result == RolloutResult("answered", "7")
    assert len(turns) == 1


@pytest.mark.parametrize(
    ("route", "more"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 2_000_000}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 99}] * 20_000}),
        ("completions", {"prompt": "x" * 2_000_000}),
        ("completions", {"prompt": [5] * 1_000_000}),
        ("responses", {"input": "x" * 2_000_000}),
        (
            "messages/count_tokens",
            {"messages": [{"role": "user", "content": "x" * 2_000_000}], "max_tokens": 1},
        ),
    ],
)
async def test_what_cannot_fit_is_refused_before_it_is_tokenized(
    store: TrajectoryStore,
    renderer: Renderer,
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    more: dict[str, Any],
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was tokenized or decoded")

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        with monkeypatch.context() as patch:
            for name in ("render", "encode", "decode"):
                patch.setattr(Renderer, name, never)
            key = {"Authorization": f"Bearer {endpoint.api_key}"}
            async with httpx.AsyncClient(trust_env=False, timeout=60, headers=key) as client:
                answer = await client.post(
                    f"{endpoint.base_url}/{route}", json={"model": MODEL, **more}
                )
        assert answer.status_code == 400
        assert "context" in answer.json()["error"]["message"]
        async with client_of(endpoint) as sdk:
            await sdk.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}]
            )
        return "7"

    with serve_script(renderer, lambda prompt: "hm") as engine:
        await begin_run(store, engine, TASK)
        sampling = SamplingSection(max_prompt_tokens=500, max_new_tokens=50)
        async with open_stage(store, engine, sampling=sampling) as stage:
            await stage.play(agent)


async def test_a_call_after_the_rollout_is_refused_and_one_under_way_is_ended(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    kept: list[AgentEndpoint] = []
    forgotten: list[asyncio.Task[Any]] = []

    async def ask(endpoint: AgentEndpoint) -> Any:
        async with client_of(endpoint) as client:
            return await client.chat.completions.create(
                model=endpoint.model, messages=[{"role": "user", "content": "slow"}]
            )

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        kept.append(endpoint)
        engine.delay_seconds = 60.0
        forgotten.append(asyncio.create_task(ask(endpoint)))
        while not engine.requests:
            await asyncio.sleep(0.01)
        return "7"

    with serve_script(renderer, lambda prompt: "hm") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            with pytest.raises(AgentError, match="without calling the policy"):
                await stage.play(agent)
            for call in (forgotten[0], ask(kept[0])):
                with pytest.raises(openai.NotFoundError, match="this rollout has ended"):
                    await call
    assert await store.database["turns"].count_documents({}) == 0


async def test_another_key_than_the_rollouts_is_refused_and_so_is_none(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        for key in ("sk-guess", "schlüssel"):
            async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key) as client:
                with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                    await client.models.list()
        async with httpx.AsyncClient(trust_env=False) as http:
            names = await http.get(f"{endpoint.base_url}/models")
            body = {"model": MODEL, "messages": [{"role": "user", "content": "7?"}]}
            call = await http.post(f"{endpoint.base_url}/chat/completions", json=body)
            tokens = {"token_ids": [1], "sampling_params": {}}
            generation = await http.post(
                f"{endpoint.anthropic_base_url}/inference/v1/generate", json=tokens
            )
        assert [one.status_code for one in (names, call, generation)] == [401] * 3
        async with client_of(endpoint) as client:
            models = [model.id async for model in client.models.list()]
            assert models == [MODEL]
            assert (await client.models.retrieve(MODEL)).owned_by == "agentrl"
        return "7"

    with serve_script(renderer, lambda prompt: "hm") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            with pytest.raises(AgentError, match="without calling the policy"):
                await stage.play(agent)


async def test_an_evaluated_route_answers_in_the_place_of_the_policy(
    store: TrajectoryStore, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRITIC_KEY", "sk-critic")

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with client_of(endpoint) as client:
            completion = await client.chat.completions.create(
                model=endpoint.model, messages=[{"role": "user", "content": task.query}]
            )
        return completion.choices[0].message.content or ""

    async with provider() as (url, _):
        route = {"base_url": url, "model": "big", "api_key_env": "CRITIC_KEY"}
        section = AgentSection(agent="x:y", evaluated_route=route)
        with serve_script(renderer, lambda prompt: "hm") as engine:
            await begin_run(store, engine, TASK)
            async with open_stage(store, engine, agents=section) as stage:
                result, turns = await stage.play(agent)
    assert result == RolloutResult("answered", "said by big")
    assert [(turn.model, turn.trainable) for turn in turns] == [("big", False)]
    assert not sent(engine)


@asynccontextmanager
async def provider() -> AsyncIterator[tuple[str, list[tuple[dict[str, Any], str]]]]:
    """Another OpenAI-compatible endpoint, and what it was asked under which key."""
    asked: list[tuple[dict[str, Any], str]] = []

    async def complete(request: Request) -> Response:
        body = await request.json()
        asked.append((body, request.headers["authorization"]))
        message = {"role": "assistant", "content": f"said by {body['model']}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({"choices": [choice], "usage": {"prompt_tokens": 3}})

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1", asked
    finally:
        server.should_exit = True
        await serving


async def test_no_two_rollouts_give_their_calls_the_same_ids(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    ids: list[str] = []

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with client_of(endpoint) as client:
            completion = await client.chat.completions.create(
                model=endpoint.model,
                messages=[{"role": "user", "content": task.query}],
                tools=[LOOK],
            )
        ids.extend(call.id for call in completion.choices[0].message.tool_calls or ())
        return ANSWER

    with serve_script(renderer, replies(CALL)) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            await stage.play(agent)
            await stage.play(agent)
    assert len(ids) == len(set(ids)) == 2


@pytest.mark.parametrize(
    ("route", "more", "problem"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "\ud83d"}]},
            "unpaired surrogate",
        ),
        ("chat/completions", {"messages": [{}] * 300_000}, "holds more than 200000 objects"),
        ("chat/completions", {"messages": [{}] * 30_000}, "messages: .* at most 20000 items"),
        ("responses", {"input": "x", "tools": ["look"]}, "tools\\[0\\]: 'look'"),
        ("responses", {"input": "x", "tools": {"look": 1}}, "tools: must be a list"),
        ("responses", {"input": "x", "previous_response_id": ["a"]}, "there is no response"),
        ("responses", {"input": "x", "text": {"format": "json"}}, "text.format: must be"),
    ],
)
async def test_a_malformed_body_is_refused_and_is_no_failure_of_the_infrastructure(
    store: TrajectoryStore, renderer: Renderer, route: str, more: dict[str, Any], problem: str
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.post(
                f"{endpoint.base_url}/{route}",
                content=json.dumps({"model": MODEL, **more}),
                headers={
                    "Content-Type": "application/json",
                    "Authorization": f"Bearer {endpoint.api_key}",
                },
            )
        assert answer.status_code in (400, 404, 413)
        assert re.search(problem, answer.json()["error"]["message"])
        async with client_of(endpoint) as sdk:
            await sdk.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}]
            )
        return "7"

    with serve_script(renderer, lambda prompt: "hm") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            result, turns = await stage.play(agent)
    assert result == RolloutResult("answered", "7")
    assert len(turns) == 1


async def test_a_header_says_whose_call_it_is_at_the_shared_address(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        root, _, rest = endpoint.base_url.partition("/s/")
        session = rest.partition("/")[0]
        async with openai.AsyncOpenAI(
            base_url=f"{root}/v1",
            api_key=endpoint.api_key,
            default_headers={"X-AgentRL-Session": session},
        ) as client:
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}]
            )
        return "7"

    with serve_script(renderer, lambda prompt: "hm") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            _, turns = await stage.play(agent)
    assert len(turns) == 1


async def test_a_call_that_failed_and_was_made_again_is_one_of_max_turns(
    store: TrajectoryStore, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.inference.client.pool._RETRY_SECONDS", (0.01,))

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        ask: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        async with client_of(endpoint) as client:
            engine.down = True
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(**ask)
            engine.down = False
            await client.chat.completions.create(**ask)
            with pytest.raises(openai.PermissionDeniedError, match="max_turns"):
                await client.chat.completions.create(**ask)
        return "7"

    with serve_script(renderer, lambda prompt: "hm") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine, rollout=RolloutSection(max_turns=1)) as stage:
            result, turns = await stage.play(agent)
    assert result == RolloutResult("answered", "7")
    assert len(turns) == 1
