"""What a client sends wrong is answered with 400 and one line, and harms nobody else."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.attacks.hostile_requests import (
    KILLERS,
    PROMPTS,
    SAMPLING,
    reference_chain,
    rule_chain,
)
from transformers import PreTrainedModel

from agentrl.inference.wire import MAX_GRAMMAR_CHARS
from agentrl.plugins.engine.engine_config import EngineConfig
from agentrl.plugins.engine.generation.token_sampling import SamplingBatch
from agentrl.plugins.engine.http.frontend import FrontEnd
from agentrl.plugins.engine.http.http_routes import make_app
from agentrl.schema.grammar import Grammar

PROMPT = {"input_ids": [1, 2, 3]}
WELL = {**PROMPT, "sampling_params": {"max_new_tokens": 4, "sampling_seed": 7}}
JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def app(model: PreTrainedModel, checkpoint: Path) -> AsyncIterator[httpx.AsyncClient]:
    engine = FrontEnd(EngineConfig(model_path=str(checkpoint), max_queued_requests=8), model)
    engine.start(lambda: None)
    transport = httpx.ASGITransport(make_app(engine), raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", headers=JSON
    ) as client:
        yield client
    engine.stop()


async def refused(app: httpx.AsyncClient, content: str) -> str:
    """Send a body that must be refused; returns the line that says why."""
    answer = await app.post("/generate", content=content.encode("utf-8", "surrogatepass"))
    assert answer.status_code == 400, answer.text
    # The engine is there, and computes what it always did.
    assert (await app.post("/generate", json=WELL)).status_code == 200
    body = answer.json()
    error = body.get("error", body)
    line = error if isinstance(error, str) else error["message"]
    assert "\n" not in line
    return str(line)


@pytest.mark.parametrize(
    "sampling",
    SAMPLING,
)
async def test_sampling_that_no_model_can_do_is_refused(
    app: httpx.AsyncClient, sampling: str
) -> None:
    await refused(app, f'{{"input_ids": [1, 2, 3], "sampling_params": {sampling}}}')


@pytest.mark.parametrize(
    "content",
    PROMPTS,
)
async def test_malformed_prompts_are_refused(app: httpx.AsyncClient, content: str) -> None:
    await refused(app, content)


async def test_a_text_beyond_the_context_is_refused_before_it_is_tokenized(
    app: httpx.AsyncClient,
) -> None:
    assert "characters" in await refused(app, json.dumps({"text": "a " * 100_000}))


async def test_a_body_of_20_mb_is_not_kept(app: httpx.AsyncClient) -> None:
    answer = await app.post("/generate", json={"text": "a " * 10_000_000})
    assert answer.status_code == 413
    assert "at most" in answer.json()["message"]


async def test_a_request_that_overfills_the_queue_is_refused_whole(
    app: httpx.AsyncClient,
) -> None:
    await app.post("/pause_generation", json={"mode": "in_place"})
    held = asyncio.create_task(app.post("/generate", json={**WELL, "rid": "held"}))
    while True:
        (load,) = (await app.get("/v1/loads")).json()["loads"]
        if load["num_waiting_reqs"] == 1:
            break
    full = await app.post("/generate", json={**PROMPT, "sampling_params": {"n": 8}})
    assert (full.status_code, "queue is full" in full.json()["message"]) == (503, True)
    await app.post("/continue_generation", json={})
    assert (await held).status_code == 200


async def test_a_request_that_fails_in_the_engine_ends_alone(
    app: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such request is known; it stands for those that are not."""
    alone = (await app.post("/generate", json=WELL)).json()["output_ids"]
    make = SamplingBatch.__init__

    def fail_at_poison(self: SamplingBatch, sequences: Any, vocab_size: int) -> None:
        if any(sequence.params.seed == 666 for sequence in sequences):
            raise RuntimeError("value cannot be converted")
        make(self, sequences, vocab_size)

    monkeypatch.setattr(SamplingBatch, "__init__", fail_at_poison)
    poison = {**PROMPT, "sampling_params": {"max_new_tokens": 4, "sampling_seed": 666}}
    answers = await asyncio.gather(
        *(app.post("/generate", json=body) for body in (WELL, poison, WELL, poison, WELL))
    )
    assert [answer.status_code for answer in answers] == [200, 500, 200, 500, 200]
    assert all(answer.json()["output_ids"] == alone for answer in answers[::2])
    assert "value cannot be converted" in answers[1].json()["message"]
    assert (await app.get("/health")).status_code == 200


@pytest.mark.parametrize("grammar", KILLERS, ids=lambda grammar: grammar.kind)
async def test_a_grammar_that_kills_the_compiler_is_refused(
    app: httpx.AsyncClient, grammar: Grammar
) -> None:
    body = {**PROMPT, "sampling_params": {grammar.kind: grammar.text}}
    line = await refused(app, json.dumps(body))
    assert "at most" in line or "too deeply" in line


@pytest.mark.parametrize(
    "grammar", [{"json_schema": reference_chain(1_500)}, {"ebnf": rule_chain(4_800)}]
)
async def test_the_longest_grammar_leaves_the_engine_alive(
    app: httpx.AsyncClient, grammar: dict[str, str]
) -> None:
    (text,) = grammar.values()
    assert 50_000 < len(text) <= MAX_GRAMMAR_CHARS
    await app.post("/generate", json={**PROMPT, "sampling_params": grammar})
    assert (await app.post("/generate", json=WELL)).status_code == 200
