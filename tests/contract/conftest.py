"""Servers under contract: the embedded engine always, a real SGLang where an address is given.

    AGENTRL_SGLANG_URL=http://127.0.0.1:30000 AGENTRL_SGLANG_MODEL=/path pytest tests/contract

The real server has to serve that directory (a small Qwen3 in float32) and be able to read files
that the tests write.
"""

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import FIRST, Oracle, Served, engine_process, make_model

from agentrl.inference.client import SGLangClient

SGLANG_URL = os.environ.get("AGENTRL_SGLANG_URL")
KINDS = ["embedded", "sglang"] if SGLANG_URL else ["embedded"]


@pytest.fixture(scope="session", params=KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server that is started once."""
    folder = tmp_path_factory.mktemp("checkpoints")
    if request.param == "sglang":
        assert SGLANG_URL is not None
        first = Path(os.environ["AGENTRL_SGLANG_MODEL"])
        yield Served("sglang", SGLANG_URL, first, perturbed(first, folder / "second"))
        return
    first = make_model(folder / "first", seed=1)
    second = make_model(folder / "second", seed=2)
    with engine_process(first, "--weight-version", FIRST) as url:
        yield Served("embedded", url, first, second)


@pytest.fixture
async def client(served: Served) -> AsyncIterator[SGLangClient]:
    """A client of the server, which serves the first checkpoint and nobody else."""
    async with SGLangClient(served.url) as connected:
        await connected.continue_()
        await connected.abort()
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
