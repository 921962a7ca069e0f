"""An engine whose memory is short answers, says so, and is replaced if that does not pass."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.little_memory import little_memory
from transformers import PreTrainedModel

from agentrl.plugins.engine.engine_config import EngineConfig
from agentrl.plugins.engine.generation.batch_scheduler import BatchScheduler
from agentrl.plugins.engine.generation.engine_loop import MAX_FAILED_STEPS
from agentrl.plugins.engine.http.frontend import FrontEnd
from agentrl.plugins.engine.http.http_routes import make_app

SLACK_BYTES = 32 << 20
LONG = 200_000
"""Tokens whose keys and values take three times the slack."""


@pytest.fixture
async def app(model: PreTrainedModel, checkpoint: Path) -> AsyncIterator[httpx.AsyncClient]:
    model.config.max_position_embeddings = 2 * LONG
    engine = FrontEnd(EngineConfig(model_path=str(checkpoint)), model)
    engine.start(lambda: None)
    transport = httpx.ASGITransport(make_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client
    engine.stop()


def body(num_tokens: int, new: int = 4) -> dict[str, Any]:
    sampling = {"max_new_tokens": new, "sampling_seed": 7, "ignore_eos": True}
    return {"input_ids": [5] * num_tokens, "sampling_params": sampling}


async def ask(app: httpx.AsyncClient, given: dict[str, Any]) -> httpx.Response:
    async with asyncio.timeout(30):
        return await app.post("/generate", json=given)


async def test_a_request_whose_cache_cannot_grow_ends_by_name(
    app: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    short = [ask(app, body(20)) for _ in range(64)]
    assert {answer.status_code for answer in await asyncio.gather(*short)} == {200}
    with little_memory(SLACK_BYTES):
        refused = await ask(app, body(LONG))
        assert refused.status_code == 500
        assert "the key-value cache cannot grow" in refused.json()["message"]
        assert len(caplog.records) < 10
        assert (await ask(app, body(20))).status_code == 200
    assert (await app.get("/health")).status_code == 200


async def test_what_runs_goes_on_beside_a_request_that_does_not_fit(
    app: httpx.AsyncClient,
) -> None:
    running = asyncio.create_task(ask(app, body(20, new=200)))
    with little_memory(SLACK_BYTES):
        await asyncio.sleep(0.1)
        assert (await ask(app, body(LONG))).status_code == 500
        assert (await running).status_code == 200


async def test_an_engine_whose_steps_all_fail_is_unhealthy_until_one_succeeds(
    app: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with little_memory(SLACK_BYTES):
        for _ in range(MAX_FAILED_STEPS):
            assert (await app.get("/health")).status_code == 200
            assert (await ask(app, body(LONG))).status_code == 500
        assert (await app.get("/health")).status_code == 503
    assert (await ask(app, body(20))).status_code == 200
    assert (await app.get("/health")).status_code == 200


async def test_a_failure_that_no_sequence_explains_does_not_spin(
    app: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def fail(self: BatchScheduler) -> None:
        attempts.append(self)
        raise RuntimeError("nobody's fault")

    monkeypatch.setattr(BatchScheduler, "_make_room", fail)
    assert (await ask(app, body(20))).status_code == 500
    assert len(attempts) == 1
