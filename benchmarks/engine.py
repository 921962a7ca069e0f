"""Compares the embedded engine with transformers, on one machine, in one run.

    python benchmarks/engine.py

The same requests (mixed prompt and output lengths, sampled at temperature 1, no early end) are sent at
once and served three ways: by the engine over HTTP in its own process, by `model.generate` in static
left-padded batches, and by transformers' continuous batching. A figure is requested output tokens over
the time to the last answer; the ways alternate, and the median of the rounds counts.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import torch
from harness.processes import engine_process
from harness.results import parser, report
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

PAD = 0


@dataclass(frozen=True)
class Job:
    """One request."""

    prompt: list[int]
    num_new: int


def make_model(directory: Path) -> Qwen3ForCausalLM:
    """Write and return a model of 1.3 million parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.eval()
    model.save_pretrained(directory)
    return model


def make_jobs(count: int) -> list[Job]:
    """Draw requests of mixed lengths."""
    draw = np.random.default_rng(0)
    return [
        Job(
            prompt=draw.integers(1, 4096, int(draw.integers(16, 129))).tolist(),
            num_new=int(draw.integers(16, 129)),
        )
        for _ in range(count)
    ]


def time_engine(url: str, jobs: Sequence[Job]) -> float:
    """Return the seconds that the engine takes over HTTP."""

    async def ask(http: httpx.AsyncClient, job: Job) -> None:
        params = {"max_new_tokens": job.num_new, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": job.prompt, "sampling_params": params, "return_logprob": True}
        answer = await http.post("/generate", json=body)
        assert len(answer.json()["output_ids"]) == job.num_new

    async def ask_all() -> float:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=url, timeout=300, limits=limits, trust_env=False
        ) as http:
            await http.post("/flush_cache")
            started = time.perf_counter()
            await asyncio.gather(*(ask(http, job) for job in jobs))
            return time.perf_counter() - started

    return asyncio.run(ask_all())


def time_static(model: Qwen3ForCausalLM, jobs: Sequence[Job], batch_size: int) -> float:
    """Return the seconds of `model.generate`."""
    started = time.perf_counter()
    for first in range(0, len(jobs), batch_size):
        batch = jobs[first : first + batch_size]
        width = max(len(job.prompt) for job in batch)
        ids = torch.tensor([[PAD] * (width - len(j.prompt)) + j.prompt for j in batch])
        mask = torch.tensor([[0] * (width - len(j.prompt)) + [1] * len(j.prompt) for j in batch])
        longest = max(job.num_new for job in batch)
        with torch.inference_mode():
            model.generate(  # type: ignore[misc]  # its self type is a private protocol
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=longest,
                min_new_tokens=longest,
                eos_token_id=None,
                pad_token_id=PAD,
            )
    return time.perf_counter() - started


def time_continuous(model: Qwen3ForCausalLM, jobs: Sequence[Job], batch_size: int) -> float:
    """Return the seconds of transformers' continuous batching."""
    config = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=1024,
        max_batch_tokens=2048,
        max_requests_per_batch=batch_size,
        return_logprobs=True,
        use_async_batching=False,
    )
    generation = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=PAD)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, warmup=False
    ) as manager:
        started = time.perf_counter()
        for job in jobs:
            manager.add_request(job.prompt, max_new_tokens=job.num_new)
        num_done = 0
        while num_done < len(jobs):
            result = manager.get_result(timeout=0.005)
            num_done += result is not None and result.is_finished()
        return time.perf_counter() - started


def measure(ways: dict[str, Callable[[], float]], num_tokens: int, rounds: int) -> dict[str, Any]:
    """Return tokens per second of each way and the engine's ratio to the others."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(rounds + 1):
        for name, run in ways.items():
            elapsed = run()
            if round_number > 0:  # the first one warms up
                seconds[name].append(elapsed)
    speeds = {name: num_tokens / median(durations) for name, durations in seconds.items()}
    return {
        "output_tokens": num_tokens,
        "tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
        "engine_over": {
            name: round(speeds["engine"] / speed, 2)
            for name, speed in speeds.items()
            if name != "engine"
        },
    }


def compared(given: argparse.Namespace) -> dict[str, Any]:
    """Serve the requests in all ways."""
    torch.set_num_threads(given.threads)
    jobs = make_jobs(given.requests)
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name))
        with engine_process(Path(name), "--num-threads", str(given.threads)) as url:
            ways: dict[str, Callable[[], float]] = {
                "engine": partial(time_engine, url, jobs),
                "static_generate": partial(time_static, model, jobs, 64),
                "continuous_batching": partial(time_continuous, model, jobs, 64),
            }
            found = measure(ways, sum(job.num_new for job in jobs), given.rounds)
    about = {"requests": given.requests, "threads": given.threads}
    return {**found, **about, "model_parameters": model.num_parameters()}


if __name__ == "__main__":
    flags = parser(__doc__, "engine")
    flags.add_argument("--requests", type=int, default=64)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--threads", type=int, default=1)
    report(flags, compared)
