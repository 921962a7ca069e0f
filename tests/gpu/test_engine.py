"""The embedded engine on a GPU: recorded steps, and memory that comes back at other addresses.

What its server promises is checked by tests/contract, on a GPU as well.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.engines import make_model

from agentrl.plugins.engine.generation.batch_scheduler import BatchScheduler, SchedulerLimits
from agentrl.plugins.engine.generation.model_runner import ModelRunner, load_model
from agentrl.plugins.engine.generation.token_sequence import DrawParams, TokenSequence
from agentrl.plugins.engine.weights.live_weights import read_weights

pytestmark = pytest.mark.gpu
LIMITS = SchedulerLimits(
    max_running=6,
    max_queued=100,
    context_length=700,
    prefill_tokens_per_step=64,
    kv_cache_bytes=1 << 24,
    prefix_cache_bytes=1 << 22,
)


def started(checkpoint: Path, *, records: bool = True) -> BatchScheduler:
    engine = BatchScheduler(load_model(checkpoint, torch.float32, "cuda"), LIMITS, "1")
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    assert runner._graphs is not None
    if not records:
        runner._graphs = None
    return engine


def sampled(engine: BatchScheduler, seed: int = 5) -> list[tuple[list[int], list[float]]]:
    numbers = np.random.default_rng(seed)
    sequences = [
        TokenSequence.start(
            f"{number:032x}",
            numbers.integers(5, 40, 500 if number == 4 else 9 * number + 3, dtype=np.int32),
            DrawParams(
                max_new_tokens=5 + 4 * number,
                seed=number,
                top_k=20 if number % 3 == 0 else -1,
                frequency_penalty=0.2 * (number % 2),
            ),
        )
        for number in range(11)
    ]
    engine.submit_all(sequences)
    while engine.has_work:
        engine.step()
    return [(sequence.output_ids, sequence.output_logprobs) for sequence in sequences]


def assert_same(
    found: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]]
) -> None:
    for (ids, logprobs), (expected_ids, expected_logprobs) in zip(found, expected, strict=True):
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)


def test_recorded_steps_sample_the_same(tmp_path: Path) -> None:
    checkpoint = make_model(tmp_path / "model", seed=1)
    assert_same(sampled(started(checkpoint)), sampled(started(checkpoint, records=False)))


def test_graphs_follow_memory_that_was_released(tmp_path: Path) -> None:
    checkpoint = make_model(tmp_path / "model", seed=1)
    engine = started(checkpoint)
    expected = sampled(engine)
    engine.memory.release([])
    elsewhere = torch.empty(1 << 20, device="cuda")
    engine.memory.resume([])
    engine.install(read_weights(checkpoint, engine.model), "2")
    assert_same(sampled(engine), expected)
    del elsewhere
