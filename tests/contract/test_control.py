"""What publishers rely upon: pauses, aborts and new weights, with generations in flight."""

import asyncio
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from support.engines import (
    SECOND,
    Oracle,
    Served,
    make_model,
    prompt,
    request,
    until_idle,
    until_waiting,
)
from support.in_flight import LONG, in_flight, split_at_update

from agentrl.errors import ServerRefused
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.wire import GenerateRequest
from agentrl.schema import SamplingParams


async def stands_still(client: SGLangClient) -> bool:
    before = (await client.loads()).num_used_tokens
    await asyncio.sleep(0.1)
    return (await client.loads()).num_used_tokens == before


async def test_abort_returns_what_was_sampled(
    client: SGLangClient, http: httpx.AsyncClient, served: Served, oracle: Oracle
) -> None:
    async with in_flight(client, http) as tasks:
        await client.abort(f"{1:032x}")
        got = await tasks[1]
        assert got.finish_reason == "abort"
        assert 0 < len(got.output_ids) < LONG
        expected = oracle.logprobs(served.first, prompt(1), got.output_ids)
        np.testing.assert_allclose(got.output_logprobs, expected, atol=1e-4)
        assert not tasks[0].done()
        await client.abort()
        assert {(await task).finish_reason for task in tasks} == {"abort"}


async def test_aborting_nobody_is_fine(client: SGLangClient) -> None:
    await client.abort("f" * 32)


async def test_pause_abort_ends_generations_and_holds_new_ones(
    client: SGLangClient, http: httpx.AsyncClient, served: Served
) -> None:
    async with in_flight(client, http) as tasks:
        await client.pause("abort")
        assert {(await task).finish_reason for task in tasks} == {"abort"}
        held = asyncio.create_task(client.generate(request(50)))
        done, _ = await asyncio.wait({held}, timeout=0.3)
        assert not done
        assert await client.health()
        await client.update_weights_from_disk(str(served.second), weight_version=SECOND)
        await client.continue_()
        got = await held
        assert [span.version for span in got.version_spans] == [2]


async def test_retract_goes_on_under_the_new_weights(
    client: SGLangClient, http: httpx.AsyncClient, served: Served, oracle: Oracle
) -> None:
    async with in_flight(client, http) as tasks:
        await client.pause("retract")
        await client.update_weights_from_disk(str(served.second), weight_version=SECOND)
        assert (await client.model_info()).weight_version == 2
        await client.continue_()
        for seed, task in enumerate(tasks):
            got = await task
            assert len(got.output_ids) == LONG
            assert got.num_retractions >= 1
            switch = split_at_update(got)
            old = oracle.logprobs(served.first, prompt(seed), got.output_ids)
            new = oracle.logprobs(served.second, prompt(seed), got.output_ids)
            np.testing.assert_allclose(got.output_logprobs[:switch], old[:switch], atol=1e-4)
            np.testing.assert_allclose(got.output_logprobs[switch:], new[switch:], atol=1e-4)


async def test_in_place_goes_on_with_the_cache_it_has(
    client: SGLangClient, http: httpx.AsyncClient, served: Served, oracle: Oracle
) -> None:
    async with in_flight(client, http) as tasks:
        await client.pause("in_place")
        assert await stands_still(client)
        await client.update_weights_from_disk(
            str(served.second), weight_version=SECOND, flush_cache=False
        )
        # A new request must not build on what the old weights computed.
        fresh = GenerateRequest(input_ids=prompt(0), sampling=SamplingParams(max_new_tokens=8))
        held = asyncio.create_task(client.generate(fresh))
        await client.continue_()
        new = await held
        if served.kind == "embedded":
            assert new.cached_tokens == 0
            expected = oracle.logprobs(served.second, prompt(0), new.output_ids)
            np.testing.assert_allclose(new.output_logprobs, expected, atol=1e-4)
        for seed, task in enumerate(tasks):
            got = await task
            switch = split_at_update(got)
            assert got.num_retractions == 0
            old = oracle.logprobs(served.first, prompt(seed), got.output_ids)
            np.testing.assert_allclose(got.output_logprobs[:switch], old[:switch], atol=1e-4)


async def test_flush_under_running_requests_is_refused_after_the_update(
    client: SGLangClient, http: httpx.AsyncClient, served: Served
) -> None:
    async with in_flight(client, http) as tasks:
        await client.pause("in_place")
        with pytest.raises(ServerRefused, match=r"(?i)weights were updated") as refused:
            await client.update_weights_from_disk(str(served.second), weight_version=SECOND)
        assert refused.value.status == 400
        await client.update_weight_version(SECOND)
        assert (await client.model_info()).weight_version == 2
        await client.continue_()
        split_at_update(await tasks[0])


async def test_update_without_pause_waits_for_what_is_in_flight(
    client: SGLangClient, http: httpx.AsyncClient, served: Served
) -> None:
    async with in_flight(client, http) as tasks:
        await client.update_weights_from_disk(str(served.second), weight_version=SECOND)
        for task in tasks:
            got = await task
            assert [span.version for span in got.version_spans] == [1]
            assert len(got.output_ids) == LONG
        later = await client.generate(request(51))
        assert [span.version for span in later.version_spans] == [2]


async def test_update_may_abort_what_is_in_flight(
    client: SGLangClient, http: httpx.AsyncClient, served: Served
) -> None:
    async with in_flight(client, http) as tasks:
        body = {
            "model_path": str(served.second),
            "weight_version": SECOND,
            "abort_all_requests": True,
            # SGLang aborts beside the update, so its cache may be in use a moment longer.
            "flush_cache": False,
        }
        answer = await http.post("/update_weights_from_disk", json=body)
        assert answer.json()["success"] is True
        assert {(await task).finish_reason for task in tasks} == {"abort"}


async def test_prefix_of_old_weights_is_not_reused(
    client: SGLangClient, served: Served, oracle: Oracle
) -> None:
    await client.generate(request(52, 100))
    await until_idle(client)  # SGLang answers a moment before its scheduler is done
    await client.update_weights_from_disk(str(served.second), weight_version=SECOND)
    got = await client.generate(request(52, 100))
    assert got.cached_tokens == 0
    expected = oracle.logprobs(served.second, prompt(52, 100), got.output_ids)
    np.testing.assert_allclose(got.output_logprobs, expected, atol=1e-4)


async def test_served_name_follows_the_weights(
    client: SGLangClient, http: httpx.AsyncClient, served: Served
) -> None:
    await client.update_weights_from_disk(str(served.second), weight_version=SECOND)
    models = (await http.get("/v1/models")).json()["data"]
    assert [(model["id"], model["owned_by"]) for model in models] == [
        (str(served.second), "sglang")
    ]


@pytest.mark.parametrize(
    "damage", ["missing", "long_name", "no_path", "empty", "cut", "lacks_tensor", "wrong_shape"]
)
async def test_unusable_checkpoint_changes_nothing(
    client: SGLangClient, served: Served, tmp_path: Path, damage: str
) -> None:
    if served.kind != "embedded" and damage != "missing":
        pytest.skip("SGLang may be left with half of a damaged checkpoint")
    before = await client.generate(request(53, temperature=0.0))
    with pytest.raises(ServerRefused) as refused:
        await client.update_weights_from_disk(
            str(damaged(served.second, tmp_path / "new", damage)), weight_version=SECOND
        )
    assert refused.value.status == 400
    assert (await client.model_info()).weight_version == 1
    await client.flush_cache()
    after = await client.generate(request(53, temperature=0.0))
    assert after.output_ids.tolist() == before.output_ids.tolist()
    np.testing.assert_allclose(after.output_logprobs, before.output_logprobs, atol=1e-5)


def damaged(source: Path, target: Path, damage: str) -> Path:
    if damage in ("long_name", "no_path"):
        return target.with_name("x" * 300 if damage == "long_name" else "a\0b")
    if damage == "missing":
        return target
    if damage == "wrong_shape":
        return make_model(target, seed=3, heads=8)
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    if damage == "empty":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        tensors = load_file(file)
        del tensors["model.norm.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
    return target


async def test_label_can_change_without_the_weights(
    client: SGLangClient, http: httpx.AsyncClient
) -> None:
    async with in_flight(client, http) as tasks:
        await client.update_weight_version("9")
        got = await tasks[0]
        assert [span.version for span in got.version_spans] == [1, 9]
    assert (await client.model_info()).weight_version == 9


async def test_cache_is_not_flushed_under_running_requests(
    client: SGLangClient, http: httpx.AsyncClient
) -> None:
    async with in_flight(client, http):
        with pytest.raises(ServerRefused):
            await client.flush_cache()


async def test_continue_without_pause_is_harmless(client: SGLangClient) -> None:
    await client.continue_()
    assert len((await client.generate(request(54, max_new_tokens=2))).output_ids) > 0


async def test_request_that_waits_at_a_pause_can_be_aborted(
    client: SGLangClient, served: Served
) -> None:
    if served.kind != "embedded":
        pytest.skip("SGLang loses aborts of requests that it holds at a pause")
    await client.pause("abort")
    waiting = request(55)
    held = asyncio.create_task(client.generate(waiting))
    await until_waiting(client, 1)
    await client.abort(waiting.rid)
    got = await held
    assert (got.finish_reason, len(got.output_ids)) == ("abort", 0)


async def test_generation_ends_when_its_client_goes_away(
    client: SGLangClient, http: httpx.AsyncClient
) -> None:
    async with in_flight(client, http) as tasks:
        for task in tasks:
            task.cancel()
        while (await client.loads()).num_running:
            await asyncio.sleep(0.02)


async def test_weight_update_session_opens_and_closes_once(http: httpx.AsyncClient) -> None:
    statuses = [
        (await http.post(f"/{verb}_weight_update", json={})).status_code
        for verb in ("end", "begin", "begin", "end")
    ]
    assert statuses == [400, 200, 400, 200]
