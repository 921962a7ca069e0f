"""The engine's process: keys, bounds, bad starts."""

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest
from pydantic import SecretStr
from safetensors.torch import load_file, save_file
from support.patience import PATIENCE
from transformers import PreTrainedModel

from agentrl.plugins.engine.__main__ import main
from agentrl.plugins.engine.engine_config import EngineConfig
from agentrl.plugins.engine.http.frontend import FrontEnd
from agentrl.plugins.engine.http.http_routes import make_app

BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}


@pytest.fixture
def settings() -> dict[str, object]:
    """`EngineConfig` fields; parametrise `settings` for others."""
    return {}


@pytest.fixture
async def front_end(
    settings: dict[str, object], model: PreTrainedModel, checkpoint: Path
) -> AsyncIterator[FrontEnd]:
    opened = FrontEnd(EngineConfig(model_path=str(checkpoint), **settings), model)
    opened.start(lambda: None)
    yield opened
    opened.stop()


@pytest.fixture
async def app(front_end: FrontEnd) -> AsyncIterator[httpx.AsyncClient]:
    """The application in this process."""
    transport = httpx.ASGITransport(make_app(front_end))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_a_web_page_cannot_stop_generation(
    app: httpx.AsyncClient, front_end: FrontEnd
) -> None:
    page = {"Content-Type": "text/plain", "Origin": "http://evil.example"}
    sent = await app.post("/pause_generation", content=b'{"mode": "abort"}', headers=page)
    assert sent.status_code == 403
    assert not front_end.scheduler.is_paused


async def test_weights_and_adapters_come_from_the_given_directories_alone(
    model: PreTrainedModel, checkpoint: Path, second_checkpoint: Path, tmp_path: Path
) -> None:
    root = tmp_path / "published"
    shutil.copytree(second_checkpoint, root / "000001")
    (root / "000002").symlink_to(checkpoint)
    config = EngineConfig(model_path=str(checkpoint), weight_roots=(root,))
    front_end = FrontEnd(config, model)
    front_end.start(lambda: None)
    transport = httpx.ASGITransport(make_app(front_end))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

        async def load(path: Path) -> httpx.Response:
            body = {"model_path": str(path), "weight_version": "1"}
            return await client.post("/update_weights_from_disk", json=body)

        for path in (second_checkpoint, root / ".." / "elsewhere", root / "000002", Path("/etc")):
            refused = await load(path)
            assert refused.status_code == 400
            assert "is outside the directories that this server loads weights from" in refused.text
        body = {"lora_name": "a", "lora_path": "/etc"}
        adapter = await client.post("/load_lora_adapter", json=body)
        assert adapter.status_code == 400
        assert "is outside the directories" in adapter.text
        assert (await load(root / "000001")).status_code == 200
    front_end.stop()


@pytest.mark.parametrize(
    "settings", [{"api_key": SecretStr("data"), "admin_api_key": SecretStr("admin")}]
)
async def test_data_and_control_have_keys_of_their_own(app: httpx.AsyncClient) -> None:
    assert (await app.get("/health")).status_code == 200
    statuses = {
        (path, key): (await app.post(path, json=BODY, headers=bearer(key))).status_code
        for path in ("/generate", "/continue_generation")
        for key in ("data", "admin", "wrong")
    }
    assert statuses == {
        ("/generate", "data"): 200,
        ("/generate", "admin"): 401,
        ("/generate", "wrong"): 401,
        ("/continue_generation", "data"): 401,
        ("/continue_generation", "admin"): 200,
        ("/continue_generation", "wrong"): 401,
    }
    unauthorized = await app.post("/generate", json=BODY)
    assert (unauthorized.status_code, unauthorized.json()) == (401, {"error": "Unauthorized"})


async def test_images_are_refused_in_words(app: httpx.AsyncClient) -> None:
    image = {"image_data": ["data:image/png;base64,AA=="]}
    refused = await app.post("/generate", json=BODY | image)
    assert refused.status_code == 400
    assert "image_data: this model reads text only" in refused.json()["error"]["message"]
    assert (await app.post("/generate", json=BODY | {"image_data": None})).status_code == 200


@pytest.mark.parametrize("settings", [{"api_key": SecretStr("data")}])
async def test_one_key_covers_both_without_an_admin_key(app: httpx.AsyncClient) -> None:
    for path in ("/generate", "/continue_generation"):
        assert (await app.post(path, json=BODY)).status_code == 401
        assert (await app.post(path, json=BODY, headers=bearer("data"))).status_code == 200


@pytest.mark.parametrize("settings", [{"admin_api_key": SecretStr("admin")}])
async def test_generation_is_open_with_an_admin_key_only(app: httpx.AsyncClient) -> None:
    assert (await app.post("/generate", json=BODY)).status_code == 200
    assert (await app.post("/continue_generation", json={})).status_code == 401


@pytest.mark.parametrize("settings", [{"context_length": 16}])
async def test_context_bounds_prompt_and_output(app: httpx.AsyncClient) -> None:
    fits = {"input_ids": [1] * 10, "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
    assert len((await app.post("/generate", json=fits)).json()["output_ids"]) == 6
    too_long = fits | {"sampling_params": {"max_new_tokens": 7}}
    assert (await app.post("/generate", json=too_long)).status_code == 400
    assert (await app.post("/generate", json=fits | {"input_ids": [1] * 16})).status_code == 400
    whatever_fits = fits | {"sampling_params": {"max_new_tokens": None, "ignore_eos": True}}
    assert len((await app.post("/generate", json=whatever_fits)).json()["output_ids"]) == 6


@pytest.mark.parametrize("settings", [{"max_queued_requests": 1}])
async def test_full_queue_is_answered_with_503(app: httpx.AsyncClient) -> None:
    batch = BODY | {"input_ids": [[1], [2], [3]]}
    answer = await app.post("/generate", json=batch)
    assert (answer.status_code, answer.json()["object"]) == (503, "error")
    assert (await app.post("/generate", json=BODY)).status_code == 200


@pytest.mark.parametrize("settings", [{"max_running_requests": 2}])
async def test_turns_of_groups_that_began_earlier_are_answered_first(
    app: httpx.AsyncClient, front_end: FrontEnd
) -> None:
    ended: list[str] = []

    async def ask(name: str, priority: int | None, num_tokens: int = 8) -> None:
        params = {"max_new_tokens": num_tokens, "ignore_eos": True}
        body = BODY | {"sampling_params": params, "priority": priority}
        assert (await app.post("/generate", json=body)).status_code == 200
        ended.append(name)

    async def waiting(number: int) -> None:
        while (await front_end.call(front_end.scheduler.load)).num_waiting < number:
            await asyncio.sleep(0.01)

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as asked:
        for name in ("running 1", "running 2"):
            asked.create_task(ask(name, -30, 60))
        for number in range(6):
            asked.create_task(ask(f"first turn {number}", -40 - number))
        await waiting(6)
        asked.create_task(ask("of nobody's run", None))
        asked.create_task(ask("second turn of group 1", -12))
        asked.create_task(ask("third turn of group 0", -5))
        await waiting(9)
    assert set(ended[:2]) == {"running 1", "running 2"}
    assert set(ended[2:4]) == {"third turn of group 0", "second turn of group 1"}
    assert [set(ended[at : at + 2]) for at in (4, 6, 8)] == [
        {f"first turn {number}", f"first turn {number + 1}"} for number in (0, 2, 4)
    ]
    assert ended[10:] == ["of nobody's run"]


async def test_closing_refuses_what_is_in_flight(
    app: httpx.AsyncClient, front_end: FrontEnd
) -> None:
    await app.post("/pause_generation", json={"mode": "retract"})
    held = asyncio.create_task(app.post("/generate", json=BODY))
    while (await front_end.call(front_end.scheduler.load)).num_waiting == 0:
        await asyncio.sleep(0.01)
    front_end.close()
    assert (await held).status_code == 503
    assert (await app.post("/generate", json=BODY)).status_code == 503
    assert (await app.get("/health")).status_code == 503


async def test_ready_tells_of_a_pause_and_health_does_not(app: httpx.AsyncClient) -> None:
    assert (await app.get("/ready")).status_code == 200
    await app.post("/pause_generation", json={"mode": "retract"})
    assert (await app.get("/ready")).status_code == 503
    assert (await app.get("/health")).status_code == 200
    await app.post("/continue_generation", json={})
    assert (await app.get("/ready")).status_code == 200


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return the one line that a refused start leaves."""
    assert main(flags) == 2
    line = capsys.readouterr().err
    assert line.startswith("agentrl engine: ")
    assert line.count("\n") == 1
    return line


def test_unusable_model_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = refused(capsys, "--model-path", str(tmp_path / "none"), "--port", "0")
    assert "no such directory" in missing
    empty = refused(capsys, "--model-path", str(tmp_path), "--port", "0")
    assert str(tmp_path) in empty
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    other = refused(capsys, "--model-path", str(tmp_path), "--port", "0")
    assert "no safetensors files" in other


def test_checkpoint_without_a_tensor_is_not_served(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight" in refused(capsys, "--model-path", str(copy), "--port", "0")


def test_config_of_a_larger_model_is_refused_before_its_memory_is_taken(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "config.json").read_text())
    larger = config | {"hidden_size": 1 << 20, "intermediate_size": 1 << 20}
    (copy / "config.json").write_text(json.dumps(larger))
    line = refused(capsys, "--model-path", str(copy), "--port", "0")
    assert "weights and config.json do not match" in line
    assert "the model expects" in line


def test_weights_that_do_not_fit_in_memory_are_refused(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Little:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Little)
    line = refused(capsys, "--model-path", str(checkpoint), "--port", "0")
    assert "GB of memory are free" in line


def test_taken_port_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = refused(capsys, "--model-path", str(checkpoint), "--port", str(port))
    assert f"127.0.0.1:{port}" in line


def test_bad_flag_value_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    line = refused(capsys, "--model-path", str(checkpoint), "--max-running-requests", "0")
    assert "--max-running-requests" in line


def test_no_engine_is_open_to_the_network_without_a_key(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_ADMIN_KEY", "k")
    line = refused(capsys, "--model-path", str(checkpoint), "--host", "0.0.0.0", "--port", "0")
    assert "--host 0.0.0.0 is reachable from outside; set AGENTRL_API_KEY" in line
