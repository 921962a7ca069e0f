"""What samplers rely upon when they generate."""

import asyncio
import json
from itertools import pairwise

import httpx
import numpy as np
import pytest
from support.engines import Oracle, Served, prompt, request
from support.in_flight import in_flight

from agentrl.errors import ServerRefused
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.wire import GenerateRequest, GenerateResult
from agentrl.schema import SamplingParams


async def test_server_describes_itself(client: SGLangClient, served: Served) -> None:
    assert await client.health()
    info = await client.model_info()
    assert (info.weight_version, info.model_path) == (1, str(served.first))
    assert "version" in await client.server_info()
    load = await client.loads()
    assert (load.num_running, load.num_waiting) == (0, 0)
    assert load.max_running > 0


async def test_a_priority_orders_requests_or_is_ignored(
    client: SGLangClient, served: Served
) -> None:
    assert await client.takes_priorities() is (served.kind == "embedded")
    got = await client.generate(request(2).model_copy(update={"priority": -5}))
    assert len(got.output_ids)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
async def test_logprobs_are_those_of_the_model_after_temperature(
    client: SGLangClient, served: Served, oracle: Oracle, temperature: float
) -> None:
    requests = [request(seed, 10 + 7 * seed, temperature=temperature) for seed in range(12)]
    results = await asyncio.gather(*(client.generate(r) for r in requests))
    for asked, got in zip(requests, results, strict=True):
        expected = oracle.logprobs(
            served.first, asked.input_ids, got.output_ids, temperature or 1.0
        )
        np.testing.assert_allclose(got.output_logprobs, expected, atol=1e-4)
        assert got.prompt_tokens == len(asked.input_ids)
        assert [(s.version, s.start, s.end) for s in got.version_spans] == [
            (1, 0, len(got.output_ids))
        ]


async def test_end_of_turn_token_is_part_of_the_output(client: SGLangClient) -> None:
    first = await client.generate(request(3, temperature=0.0, max_new_tokens=8))
    stop = int(first.output_ids[4])
    got = await client.generate(request(3, temperature=0.0, stop_token_ids=(stop,)))
    end = first.output_ids.tolist().index(stop) + 1
    assert got.output_ids.tolist() == first.output_ids[:end].tolist()
    assert (got.finish_reason, got.matched) == ("stop", stop)
    assert len(got.output_logprobs) == end


async def test_length_ends_a_generation(client: SGLangClient) -> None:
    got = await client.generate(request(4, temperature=0.0, max_new_tokens=3))
    assert (len(got.output_ids), got.finish_reason, got.matched) == (3, "length", None)


async def test_known_prefix_is_reused_and_changes_no_logprob(
    client: SGLangClient, served: Served, oracle: Oracle
) -> None:
    await client.flush_cache()
    first = await client.generate(request(5, 200, temperature=0.0))
    assert first.cached_tokens == 0
    again = await client.generate(request(5, 200, temperature=0.0))
    assert again.cached_tokens >= 190
    assert again.output_ids.tolist() == first.output_ids.tolist()
    np.testing.assert_allclose(again.output_logprobs, first.output_logprobs, atol=1e-4)
    # The next turn of a conversation starts with everything that was sampled.
    longer = np.concatenate([prompt(5, 200), first.output_ids, prompt(6, 20)])
    turn = GenerateRequest(input_ids=longer, sampling=SamplingParams(max_new_tokens=16))
    got = await client.generate(turn)
    assert got.cached_tokens >= 200 + len(first.output_ids) - 2
    expected = oracle.logprobs(served.first, longer, got.output_ids)
    np.testing.assert_allclose(got.output_logprobs, expected, atol=1e-4)


async def test_samples_of_one_prompt_compute_it_once(
    client: SGLangClient, served: Served, oracle: Oracle
) -> None:
    if served.kind != "embedded":
        pytest.skip("SGLang decides by its own schedule")
    await client.flush_cache()
    requests = [request(7, 300, seed=seed) for seed in range(8)]
    results = await asyncio.gather(*(client.generate(r) for r in requests))
    assert sorted(result.cached_tokens for result in results) == [0] + [299] * 7
    for got in results:
        expected = oracle.logprobs(served.first, prompt(7, 300), got.output_ids)
        np.testing.assert_allclose(got.output_logprobs, expected, atol=1e-4)


async def test_prefixes_are_not_shared_between_namespaces(client: SGLangClient) -> None:
    await client.generate(request(8, 100))
    other = request(8, 100).model_copy(update={"extra_key": "other"})
    assert (await client.generate(other)).cached_tokens == 0


async def test_seed_decides_the_sample_whatever_runs_beside_it(
    client: SGLangClient, served: Served
) -> None:
    if served.kind != "embedded":
        pytest.skip("SGLang follows seeds in its deterministic mode only")
    alone = await client.generate(request(9, seed=5))
    crowd = [client.generate(request(9 + n, seed=n)) for n in range(1, 16)]
    same, different, *_ = await asyncio.gather(
        client.generate(request(9, seed=5)), client.generate(request(9, seed=6)), *crowd
    )
    assert same.output_ids.tolist() == alone.output_ids.tolist()
    assert different.output_ids.tolist() != alone.output_ids.tolist()


async def test_long_prompt_does_not_disturb_others(
    client: SGLangClient, served: Served, oracle: Oracle
) -> None:
    requests = [request(20, 3000), *(request(21 + n, 30, max_new_tokens=40) for n in range(6))]
    results = await asyncio.gather(*(client.generate(r) for r in requests))
    for asked, got in zip(requests, results, strict=True):
        expected = oracle.logprobs(served.first, asked.input_ids, got.output_ids)
        np.testing.assert_allclose(got.output_logprobs, expected, atol=1e-4)


async def test_live_request_id_is_not_taken_twice(
    client: SGLangClient, http: httpx.AsyncClient
) -> None:
    async with in_flight(client, http, 1) as (running,):
        again = request(30).model_copy(update={"rid": "0" * 32})
        with pytest.raises(ServerRefused) as refused:
            await client.generate(again)
        assert refused.value.status == 400
        await client.abort(again.rid)
        assert (await running).finish_reason == "abort"


RULE, PARAMETER, SHAPE = "error.message", "error", "object"
"""The three forms of an error: a broken rule, a wrong sampling parameter, a wrong field."""


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"sampling_params": {"max_tokens": 3}}, PARAMETER),
        ({"sampling_params": {"seed": 3}}, PARAMETER),
        ({"sampling_params": {"max_new_tokens": 4.0}}, PARAMETER),
        ({"sampling_params": {"max_new_tokens": True}}, PARAMETER),
        ({"sampling_params": {"temperature": -1}}, RULE),
        ({"sampling_params": {"top_p": 0}}, RULE),
        ({"sampling_params": {"top_p": 1.5}}, RULE),
        ({"sampling_params": {"top_k": 0}}, RULE),
        ({"sampling_params": {"min_p": 2}}, RULE),
        ({"sampling_params": {"frequency_penalty": 3}}, RULE),
        ({"sampling_params": {"repetition_penalty": 0}}, RULE),
        ({"sampling_params": {"max_new_tokens": -1}}, RULE),
        ({"sampling_params": {"max_new_tokens": 10**6}}, RULE),
        ({"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}, RULE),
        ({"sampling_params": "greedy"}, SHAPE),
        ({"input_ids": "text"}, SHAPE),
        ({"input_ids": [1.5]}, SHAPE),
        ({"input_ids": []}, RULE),
        ({"input_ids": None}, RULE),
        ({"input_ids": [1] * 5000}, RULE),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, RULE),
        ({"text": 3}, SHAPE),
        ({"rid": 3}, SHAPE),
        ({"extra_key": 3}, SHAPE),
        ({"stream": None}, SHAPE),
        ({"stream": 1}, PARAMETER),
        ({"return_logprob": "x"}, SHAPE),
        ({"return_logprob": 1}, PARAMETER),
        ({"return_prompt_token_ids": None}, SHAPE),
        ({"return_text_in_logprobs": None}, SHAPE),
        ({"logprob_start_len": "a"}, SHAPE),
        ({"logprob_start_len": 99, "return_logprob": True}, RULE),
        ({"lora_path": "x"}, RULE),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_malformed_request_is_refused(
    http: httpx.AsyncClient, body: dict[str, object], form: str
) -> None:
    answer = await http.post("/generate", json={"input_ids": [1, 2, 3]} | body)
    assert answer.status_code == 400
    assert form_of(answer) == form


def form_of(answer: httpx.Response) -> str:
    body = answer.json()
    if body.get("object") == "error":
        assert isinstance(body["message"], str)
        assert body["code"] == answer.status_code
        return SHAPE
    return RULE if isinstance(body["error"], dict) and body["error"]["message"] else PARAMETER


async def test_ids_beyond_the_vocabulary_are_refused(
    http: httpx.AsyncClient, served: Served
) -> None:
    if served.kind != "embedded":
        pytest.skip("SGLang's scheduler dies of them")
    for ids in ([1, 10**6], [-1, 2]):
        answer = await http.post("/generate", json={"input_ids": ids})
        assert (answer.status_code, form_of(answer)) == (400, RULE)


async def test_unknown_fields_and_nulls_are_fine(http: httpx.AsyncClient) -> None:
    body = {
        "input_ids": [1, 2, 3],
        "no_such_field": 1,
        "return_logprob": None,
        "sampling_params": {"max_new_tokens": 2, "top_k": None, "stop": None, "regex": None},
    }
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 200
    assert len(answer.json()["output_ids"]) <= 2


async def test_ids_count_where_text_is_given_too(http: httpx.AsyncClient) -> None:
    # Prompt logprobs that nobody asks for may start anywhere.
    body = {"input_ids": [1, 2, 3], "text": "longer than that", "logprob_start_len": 99}
    params = {"max_new_tokens": 1, "stop_token_ids": [10**6]}
    answer = await http.post("/generate", json=body | {"sampling_params": params})
    assert answer.json()["meta_info"]["prompt_tokens"] == 3


async def test_batches_are_answered_in_order(http: httpx.AsyncClient) -> None:
    prompts = [prompt(seed, 5 + seed).tolist() for seed in range(4)]
    params = [{"max_new_tokens": n + 1, "temperature": 0, "ignore_eos": True} for n in range(4)]
    answer = await http.post("/generate", json={"input_ids": prompts, "sampling_params": params})
    assert [len(item["output_ids"]) for item in answer.json()] == [1, 2, 3, 4]
    assert [item["meta_info"]["prompt_tokens"] for item in answer.json()] == [5, 6, 7, 8]


async def test_several_samples_of_one_request(http: httpx.AsyncClient) -> None:
    params = {"max_new_tokens": 4, "n": 3, "ignore_eos": True}
    answer = await http.post("/generate", json={"input_ids": [1, 2], "sampling_params": params})
    assert [len(item["output_ids"]) for item in answer.json()] == [4, 4, 4]


async def test_stream_is_cumulative_and_ends_with_done(http: httpx.AsyncClient) -> None:
    body = {
        "input_ids": prompt(40).tolist(),
        "stream": True,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True},
    }
    async with http.stream("POST", "/generate", json=body) as answer:
        frames = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert frames[-1] == "[DONE]"
    bodies = [json.loads(frame) for frame in frames[:-1]]
    outputs = [item["output_ids"] for item in bodies]
    assert all(b[: len(a)] == a for a, b in pairwise(outputs))
    last = bodies[-1]["meta_info"]
    assert len(outputs[-1]) == len(last["output_token_logprobs"]) == 12
    assert last["finish_reason"]["type"] == "length"
    assert all(item["meta_info"]["finish_reason"] is None for item in bodies[:-1])


async def test_prompt_logprobs_from_a_position_on(
    http: httpx.AsyncClient, served: Served, oracle: Oracle
) -> None:
    ids = prompt(41, 50)
    body = {
        "input_ids": ids.tolist(),
        "return_logprob": True,
        "logprob_start_len": 10,
        "sampling_params": {"max_new_tokens": 2},
    }
    answer = await http.post("/generate", json=body)
    triples = answer.json()["meta_info"]["input_token_logprobs"]
    assert [triple[1] for triple in triples] == ids[10:].tolist()
    assert triples[0][0] is None
    expected = oracle.logprobs(served.first, ids[:11], ids[11:])
    np.testing.assert_allclose([triple[0] for triple in triples[1:]], expected, atol=1e-4)


async def test_stop_string_ends_text_but_not_ids(http: httpx.AsyncClient) -> None:
    params = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt(42).tolist(), "sampling_params": params}
    whole = (await http.post("/generate", json=body)).json()
    stop = whole["text"][3:5]
    body["sampling_params"] = params | {"stop": [stop]}
    got = (await http.post("/generate", json=body)).json()
    assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert got["text"] == whole["text"].partition(stop)[0]
    count = len(got["output_ids"])
    assert got["output_ids"] == whole["output_ids"][:count]


async def test_text_prompt_is_tokenized(http: httpx.AsyncClient) -> None:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 1}}
    answer = (await http.post("/generate", json=body | {"return_prompt_token_ids": True})).json()
    assert len(answer["prompt_token_ids"]) == answer["meta_info"]["prompt_tokens"] == 5


async def test_unknown_route_and_wrong_method(http: httpx.AsyncClient) -> None:
    unknown = await http.post("/no_such_route", json={})
    assert (unknown.status_code, unknown.json()) == (404, {"detail": "Not Found"})
    wrong = await http.get("/generate")
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause_generation", None),
        ("/pause_generation", {"mode": "never"}),
        ("/pause_generation", {"mode": None}),
        ("/continue_generation", None),
        ("/continue_generation", []),
        ("/abort_request", None),
        ("/abort_request", {"rid": 3}),
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_disk", {"model_path": 3}),
        ("/update_weight_version", {}),
        ("/begin_weight_update", {"selector": "some"}),
    ],
)
async def test_malformed_command_is_refused(
    http: httpx.AsyncClient, path: str, body: object
) -> None:
    content = b"" if body is None else json.dumps(body).encode()
    answer = await http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, form_of(answer)) == (400, SHAPE)


async def test_a_listener_is_told_of_growing_beginnings(
    client: SGLangClient, served: Served, oracle: Oracle
) -> None:
    told: list[GenerateResult] = []
    asked = request(42, temperature=0.0, max_new_tokens=20)
    result = await client.generate(asked, told.append)
    outputs = [part.output_ids.tolist() for part in told]
    assert outputs
    assert all(len(a) < len(b) and b[: len(a)] == a for a, b in pairwise(outputs))
    assert result.output_ids.tolist()[: len(outputs[-1])] == outputs[-1]
    expected = oracle.logprobs(served.first, asked.input_ids, result.output_ids)
    np.testing.assert_allclose(told[-1].output_logprobs, expected[: len(outputs[-1])], atol=1e-4)
