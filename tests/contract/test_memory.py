"""What turns on one device rely upon: memory given back and taken again, generations in flight.

SGLang on a CPU knows the routes and has no memory saver: it answers, keeps its books, and frees
nothing. What it would die of is asked of the embedded engine alone.
"""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from support.engines import FIRST, SECOND, Oracle, Served, prompt, request
from support.in_flight import LONG, in_flight, split_at_update

from agentrl.errors import InferenceError
from agentrl.inference.client.sglang_client import SGLangClient

BOTH = ("kv_cache", "weights")


def only_embedded(served: Served, why: str) -> None:
    if served.kind != "embedded":
        pytest.skip(why)


async def test_retracted_generations_go_on_when_memory_is_back(
    client: SGLangClient, http: httpx.AsyncClient, served: Served, oracle: Oracle
) -> None:
    async with in_flight(client, http) as tasks:
        await client.pause("retract")
        await client.flush_cache()
        await client.release_memory(BOTH)
        done, _ = await asyncio.wait(tasks, timeout=0.3)
        assert not done
        assert await client.health()
        assert (await client.model_info()).weight_version == 1
        await client.resume_memory(["weights"])
        await client.update_weights_from_disk(str(served.second), weight_version=SECOND)
        await client.resume_memory(["kv_cache"])
        await client.continue_()
        for seed, task in enumerate(tasks):
            got = await task
            assert len(got.output_ids) == LONG
            switch = split_at_update(got)
            old = oracle.logprobs(served.first, prompt(seed), got.output_ids)
            new = oracle.logprobs(served.second, prompt(seed), got.output_ids)
            np.testing.assert_allclose(got.output_logprobs[:switch], old[:switch], atol=1e-4)
            np.testing.assert_allclose(got.output_logprobs[switch:], new[switch:], atol=1e-4)


async def test_generations_are_cut_and_new_ones_wait_for_the_memory(
    client: SGLangClient, http: httpx.AsyncClient, served: Served, oracle: Oracle
) -> None:
    async with in_flight(client, http) as tasks:
        await client.pause("abort")
        assert {(await task).finish_reason for task in tasks} == {"abort"}
        await until_flushed(client)
        await client.release_memory(BOTH)
        waiting = asyncio.create_task(client.generate(request(0)))
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        await client.resume_memory(["weights"])
        await client.update_weights_from_disk(str(served.second), weight_version=SECOND)
        await client.resume_memory(["kv_cache"])
        await client.continue_()
        got = await waiting
    assert [span.version for span in got.version_spans] == [2]
    assert got.cached_tokens == 0
    expected = oracle.logprobs(served.second, prompt(0), got.output_ids)
    np.testing.assert_allclose(got.output_logprobs, expected, atol=1e-4)


async def test_the_cache_alone_may_be_released(
    client: SGLangClient, served: Served, oracle: Oracle
) -> None:
    await client.generate(request(5))
    await client.pause("retract")
    await client.flush_cache()
    await client.release_memory(["kv_cache"])
    await client.resume_memory(["kv_cache"])
    await client.continue_()
    got = await client.generate(request(5))
    assert got.cached_tokens == 0
    expected = oracle.logprobs(served.first, prompt(5), got.output_ids)
    np.testing.assert_allclose(got.output_logprobs, expected, atol=1e-4)


async def test_no_tags_are_all_tags_and_success_is_null(
    client: SGLangClient, http: httpx.AsyncClient, served: Served
) -> None:
    bodies: tuple[dict[str, Any], ...] = ({}, {"tags": None}, {"tags": []})
    for body in bodies:
        for route in ("/release_memory_occupation", "/resume_memory_occupation"):
            answer = await http.post(route, json=body)
            assert (answer.status_code, answer.json()) == (200, None)
    await client.update_weights_from_disk(str(served.first), weight_version=FIRST)
    assert len((await client.generate(request(6))).output_ids)


@pytest.mark.parametrize("tags", ["weights", [1], {"weights": True}])
async def test_tags_are_a_list_of_strings(
    http: httpx.AsyncClient, served: Served, tags: object
) -> None:
    answer = await http.post("/release_memory_occupation", json={"tags": tags})
    assert answer.status_code == 400


async def test_a_busy_server_keeps_its_memory(
    client: SGLangClient, http: httpx.AsyncClient, served: Served
) -> None:
    only_embedded(served, "SGLang's scheduler ends with an assertion")
    async with in_flight(client, http) as tasks:
        answer = await http.post("/release_memory_occupation", json={})
        assert answer.status_code == 400
        assert "idle" in answer.json()["error"]["message"]
        await client.pause("in_place")
        assert (await http.post("/release_memory_occupation", json={})).status_code == 400
        await client.continue_()
        assert {len((await task).output_ids) for task in tasks} == {LONG}


async def test_only_what_was_released_is_resumed(
    client: SGLangClient, http: httpx.AsyncClient, served: Served
) -> None:
    only_embedded(served, "SGLang's scheduler ends with a KeyError")
    await client.release_memory(["kv_cache"])
    answer = await http.post("/resume_memory_occupation", json={"tags": ["kv_cache", "weights"]})
    assert answer.status_code == 400
    assert "weights was not released" in answer.json()["error"]["message"]
    await client.resume_memory(["kv_cache"])
    assert len((await client.generate(request(7))).output_ids)


async def test_weights_are_not_loaded_where_there_is_no_memory_for_them(
    client: SGLangClient, served: Served
) -> None:
    only_embedded(served, "SGLang on a GPU would write to unmapped memory")
    await client.release_memory(BOTH)
    with pytest.raises(InferenceError, match="resume it before loading"):
        await client.update_weights_from_disk(str(served.second), weight_version=SECOND)
    await client.resume_memory(BOTH)
    await client.update_weights_from_disk(str(served.first), weight_version=FIRST)


async def test_nothing_is_sampled_from_weights_without_values(
    client: SGLangClient, served: Served, oracle: Oracle
) -> None:
    only_embedded(served, "SGLang samples from whatever is in the memory")
    await client.release_memory(BOTH)
    waiting = asyncio.create_task(client.generate(request(8)))
    await client.resume_memory(BOTH)
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    await client.update_weights_from_disk(str(served.second), weight_version=SECOND)
    got = await waiting
    expected = oracle.logprobs(served.second, prompt(8), got.output_ids)
    np.testing.assert_allclose(got.output_logprobs, expected, atol=1e-4)


async def until_flushed(client: SGLangClient) -> None:
    """Flush (bounded by the test's own timeout); what was aborted is computed for one more step."""
    while True:
        try:
            await client.flush_cache()
        except InferenceError:
            await asyncio.sleep(0.02)
        else:
            return
