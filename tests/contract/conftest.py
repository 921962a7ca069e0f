"""Servers under contract: the embedded engine always, a real SGLang in the slow tests.

SGLang runs on the CPU (`scripts/sglang_cpu install`, then `scripts/sglang_cpu test`), or anywhere:

    AGENTRL_SGLANG_URL=http://127.0.0.1:30000 AGENTRL_SGLANG_MODEL=/path pytest -m slow tests/contract

The given server has to serve that directory (a small Qwen3 in float32), to be able to read files
that the tests write, and to run with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false.
"""

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from harness.processes import engine_process
from safetensors.torch import load_file, save_file
from support.engines import FIRST, Oracle, Served, make_model, until_idle
from support.sglang import sglang_process

from agentrl.inference.client.sglang_client import SGLangClient

KINDS = [
    "embedded",
    pytest.param("embedded on a GPU", marks=pytest.mark.gpu),
    # SGLang takes the better part of a minute to start.
    pytest.param("sglang", marks=pytest.mark.slow),
]


@pytest.fixture(scope="session", params=KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server that is started once."""
    folder = tmp_path_factory.mktemp("checkpoints")
    url = os.environ.get("AGENTRL_SGLANG_URL")
    if request.param == "sglang" and url is not None:
        first = Path(os.environ["AGENTRL_SGLANG_MODEL"])
        yield Served("sglang", url, first, perturbed(first, folder / "second"))
        return
    first = make_model(folder / "first", seed=1)
    second = make_model(folder / "second", seed=2)
    kind, _, is_on_gpu = request.param.partition(" ")
    device = ("--device", "cuda" if is_on_gpu else "cpu", "--dtype", "float32")
    running = (
        engine_process(first, "--weight-version", FIRST, *device)
        if kind == "embedded"
        else sglang_process(first, folder / "sglang.log")
    )
    with running as url:
        yield Served(kind, url, first, second)


@pytest.fixture
async def client(served: Served) -> AsyncIterator[SGLangClient]:
    """A client of the server, which serves the first checkpoint and nobody else."""
    async with SGLangClient(served.url) as connected:
        await connected.continue_()
        await connected.abort()
        # What was aborted is computed for one more step, and would keep the cache from its flush.
        await until_idle(connected)
        await connected.update_weights_from_disk(str(served.first), weight_version=FIRST)
        yield connected
        await connected.continue_()
        await connected.abort()


@pytest.fixture
async def http(served: Served, client: SGLangClient) -> AsyncIterator[httpx.AsyncClient]:
    """Plain HTTP to the server, for requests that the client would not send."""
    async with httpx.AsyncClient(base_url=served.url, timeout=25, trust_env=False) as connected:
        yield connected


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """What the server's logprobs are compared with."""
    return Oracle()


def perturbed(source: Path, target: Path) -> Path:
    """Write a copy of a checkpoint with other weights."""
    shutil.copytree(source, target)
    torch.manual_seed(0)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        changed = {name: t * (1 + 0.3 * torch.randn_like(t)) for name, t in tensors.items()}
        save_file(changed, file, metadata={"format": "pt"})
    return target
