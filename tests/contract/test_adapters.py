"""Adapters: loaded while generations go on, named request by request, never taken away in use.

SGLang 0.5.23 does not start with adapters on a CPU (it pins memory, which needs an accelerator), so
the cases run against one that was started elsewhere, with a small Qwen3 in float32:

    python -m sglang.launch_server --model-path MODEL --dtype float32 --weight-version 1 \\
      --enable-lora --max-lora-rank 8 --lora-target-modules q_proj k_proj v_proj o_proj \\
      gate_proj up_proj down_proj
    AGENTRL_SGLANG_LORA_URL=http://127.0.0.1:30000 AGENTRL_SGLANG_MODEL=MODEL \\
      pytest -m slow -k sglang tests/contract/test_adapters.py
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from harness.processes import engine_process
from support.adapters import make_adapter
from support.engines import FIRST, Oracle, Served, make_model, prompt, request

from agentrl.errors import ServerRefused
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.models.lora import merge_adapter

KINDS = ["embedded", pytest.param("sglang", marks=pytest.mark.slow)]
NAMES = ("run-abcdef-v1", "run-abcdef-v2")


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    if request.param == "embedded":
        model = make_model(folder / "model", seed=1)
        write_adapters(model, folder)
        with engine_process(model, "--weight-version", FIRST) as url:
            yield Served(request.param, url, model, folder)
        return
    url = os.environ.get("AGENTRL_SGLANG_LORA_URL", "")
    if not url:
        pytest.skip(
            "SGLang pins memory for adapters and so needs a GPU; see the module's docstring"
        )
    model = Path(os.environ["AGENTRL_SGLANG_MODEL"])
    write_adapters(model, folder)
    yield Served(request.param, url, model, folder)


def write_adapters(model: Path, folder: Path) -> None:
    for number, name in enumerate(NAMES):
        make_adapter(model, folder / name, seed=number)


@pytest.fixture
async def client(served: Served) -> AsyncIterator[SGLangClient]:
    """A client of a server that holds both adapters."""
    async with SGLangClient(served.url) as connected:
        for name in set(NAMES) - set(await connected.adapters()):
            await connected.load_adapter(name, str(served.second / name))
        yield connected


@pytest.fixture(scope="module")
def oracles(served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """Checkpoints of the model with each adapter added into its weights."""
    folder = tmp_path_factory.mktemp("merged")
    found: dict[str | None, Path] = {None: served.first}
    for name in NAMES:
        found[name] = merge_adapter(served.second / name, served.first, folder / name)
    return found


async def test_each_request_is_answered_under_the_adapter_that_it_names(
    client: SGLangClient, oracles: dict[str | None, Path], oracle: Oracle
) -> None:
    asked = [(number, name) for number in range(3) for name in oracles]
    results = await asyncio.gather(
        *(
            client.generate(request(number, 20 + number).model_copy(update={"adapter": name}))
            for number, name in asked
        )
    )
    for (number, name), result in zip(asked, results, strict=True):
        start = prompt(number, 20 + number)
        expected = oracle.logprobs(oracles[name], start, result.output_ids)
        np.testing.assert_allclose(result.output_logprobs, expected, atol=1e-4)
        others = [other for other in oracles if other != name]
        for other in others:
            wrong = oracle.logprobs(oracles[other], start, result.output_ids)
            assert np.abs(result.output_logprobs - wrong).max() > 0.01
        (span,) = result.version_spans
        assert (span.start, span.end) == (0, len(result.output_ids))
        assert span.version == {None: 1, NAMES[0]: 1, NAMES[1]: 2}[name]


async def test_what_one_adapter_computed_is_not_reused_under_another(
    client: SGLangClient, oracles: dict[str | None, Path], oracle: Oracle
) -> None:
    for name in (*oracles, NAMES[0]):
        result = await client.generate(request(77, 60).model_copy(update={"adapter": name}))
        expected = oracle.logprobs(oracles[name], prompt(77, 60), result.output_ids)
        np.testing.assert_allclose(result.output_logprobs, expected, atol=1e-4)


async def test_an_adapter_is_unloaded_when_the_generations_that_use_it_have_ended(
    client: SGLangClient, served: Served, oracles: dict[str | None, Path], oracle: Oracle
) -> None:
    old = request(5, 30, max_new_tokens=200, stop_token_ids=()).model_copy(
        update={"adapter": NAMES[0]}
    )
    going_on = asyncio.create_task(client.generate(old))
    while not (await client.loads()).num_running:
        await asyncio.sleep(0.01)
    unloading = asyncio.create_task(client.unload_adapter(NAMES[0]))
    while NAMES[0] in await client.adapters():
        await asyncio.sleep(0.01)
    with pytest.raises(ServerRefused, match="not loaded") as refused:
        await client.generate(request(6).model_copy(update={"adapter": NAMES[0]}))
    assert refused.value.status == 400
    new = await client.generate(request(7).model_copy(update={"adapter": NAMES[1]}))
    assert len(new.output_ids)
    result = await going_on
    expected = oracle.logprobs(oracles[NAMES[0]], prompt(5, 30), result.output_ids)
    np.testing.assert_allclose(result.output_logprobs, expected, atol=1e-4)
    await asyncio.wait_for(unloading, 20)


async def test_a_name_is_given_once_and_unknown_ones_are_refused(
    client: SGLangClient, served: Served, tmp_path: Path
) -> None:
    with pytest.raises(ServerRefused, match=r"already") as refused:
        await client.load_adapter(NAMES[1], str(served.second / NAMES[0]))
    assert refused.value.status == 400
    with pytest.raises(ServerRefused) as refused:
        await client.load_adapter("run-abcdef-v9", str(tmp_path / "nowhere"))
    assert refused.value.status == 400
    with pytest.raises(ServerRefused) as refused:
        await client.unload_adapter("run-abcdef-v9")
    assert refused.value.status == 400
    assert set(await client.adapters()) == set(NAMES)


async def test_one_body_may_name_an_adapter_a_prompt(
    client: SGLangClient, served: Served, oracles: dict[str | None, Path], oracle: Oracle
) -> None:
    names = [NAMES[1], None, NAMES[0]]
    body = {
        "input_ids": [prompt(number).tolist() for number in range(3)],
        "lora_path": names,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 8},
    }
    async with httpx.AsyncClient(base_url=served.url, timeout=25, trust_env=False) as http:
        answers = (await http.post("/generate", json=body)).json()
    for number, (name, answer) in enumerate(zip(names, answers, strict=True)):
        triples = answer["meta_info"]["output_token_logprobs"]
        output = np.array([triple[1] for triple in triples], dtype=np.int32)
        expected = oracle.logprobs(oracles[name], prompt(number), output)
        np.testing.assert_allclose([triple[0] for triple in triples], expected, atol=1e-4)
        assert torch.isfinite(torch.tensor(expected)).all()
