"""Tiny models for inference servers, requests to them, and transformers as the oracle."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.tiny_tokenizer import write_tokenizer
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.wire import GenerateRequest
from agentrl.schema import SamplingParams

VOCAB_SIZE = 265
EOS = 258
CONTEXT = 4096
# More threads than free cores cost a tiny model far more than they give.
torch.set_num_threads(1)

FIRST, SECOND = "1", "2"
"""Versions of two checkpoints."""


@dataclass(frozen=True)
class Served:
    """A server with two checkpoints for it."""

    kind: str
    url: str
    first: Path
    second: Path


class Oracle:
    """transformers' own forward pass."""

    def __init__(self) -> None:
        self._models: dict[Path, Any] = {}

    def logprobs(
        self, checkpoint: Path, prompt: np.ndarray, output: np.ndarray, temperature: float = 1.0
    ) -> np.ndarray:
        """Return the logprobs of the output ids after the prompt, float32 [T]."""
        if checkpoint not in self._models:
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
            self._models[checkpoint] = model.eval()
        ids = torch.from_numpy(np.concatenate([prompt, output]).astype(np.int64))
        with torch.no_grad():
            logits = self._models[checkpoint](ids[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / temperature).log_softmax(-1)
        found: np.ndarray = logprobs.gather(1, ids[len(prompt) :, None])[:, 0].numpy()
        return found


def prompt(seed: int, length: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 250, length).astype(np.int32)


def request(number: int, length: int = 40, **params: Any) -> GenerateRequest:
    sampling = SamplingParams(**({"max_new_tokens": 24} | params))
    return GenerateRequest(input_ids=prompt(number, length), sampling=sampling)


async def until_waiting(client: SGLangClient, count: int) -> None:
    """Wait (bounded by the test's own timeout) until so many requests are there."""
    while True:
        load = await client.loads()
        if load.num_running + load.num_waiting >= count:
            return
        await asyncio.sleep(0.02)


async def until_idle(client: SGLangClient) -> None:
    """Wait (bounded by the test's own timeout) until nothing runs or waits."""
    while (load := await client.loads()).num_running + load.num_waiting:
        await asyncio.sleep(0.02)


async def check_serves(url: str, checkpoint: Path, version: int) -> None:
    """Hold what a server samples, and under which version, against the model of a checkpoint."""
    async with SGLangClient(url) as client:
        got = await client.generate(request(5))
    assert [span.version for span in got.version_spans] == [version]
    expected = Oracle().logprobs(checkpoint, prompt(5), got.output_ids)
    np.testing.assert_allclose(got.output_logprobs, expected, atol=1e-4)


def make_model(directory: Path, *, seed: int, heads: int = 4, num_experts: int = 0) -> Path:
    """Write a Qwen3 of two layers with random weights, and a tokenizer.

    The weights are large enough for different weights to give clearly different logprobs. With experts,
    it is a mixture of them.
    """
    write_tokenizer(directory)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": EOS,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    if num_experts:
        sizes |= {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(directory)
    else:
        Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(directory)
    return directory
