"""Decode steps of fixed shapes compute what steps of the batch's own shapes do."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import make_model
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.plugins.engine.generation import decode_graphs
from agentrl.plugins.engine.generation.batch_scheduler import BatchScheduler, SchedulerLimits
from agentrl.plugins.engine.generation.decode_graphs import DecodeGraphs, DecodeStep, graph_shape
from agentrl.plugins.engine.generation.model_runner import ModelRunner, load_model
from agentrl.plugins.engine.generation.token_sequence import DrawParams, TokenSequence

LIMITS = SchedulerLimits(
    max_running=6,
    max_queued=100,
    context_length=700,
    prefill_tokens_per_step=64,
    kv_cache_bytes=1 << 24,
    prefix_cache_bytes=1 << 22,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("graphs"), seed=1)


class Unrecorded:
    """What a recorded step computes, without a GPU to record it on."""

    made: list["Unrecorded"] = []

    def __init__(self, step: DecodeStep) -> None:
        self.step, self.num_replayed = step, 0
        self.made.append(self)

    def replay(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        self.num_replayed += 1
        self.step.set_inputs(tokens, positions)
        return self.step.compute()


class Operations(TorchDispatchMode):
    """Counts the operations within the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its signature out
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def sampled(engine: BatchScheduler) -> list[tuple[list[int], list[float]]]:
    """Sample from eleven prompts, more than there are rows, one of them long."""
    numbers = np.random.default_rng(5)
    sequences = [
        TokenSequence.start(
            f"{number:032x}",
            numbers.integers(5, 40, 500 if number == 4 else 9 * number + 3, dtype=np.int32),
            DrawParams(max_new_tokens=5 + 4 * number, seed=number),
        )
        for number in range(11)
    ]
    engine.submit_all(sequences)
    while engine.has_work:
        engine.step()
    return [(sequence.output_ids, sequence.output_logprobs) for sequence in sequences]


def test_whole_answers_are_the_same(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sampled(BatchScheduler(load_model(checkpoint, torch.float64), LIMITS, "1"))
    monkeypatch.setattr(decode_graphs, "_RecordedStep", Unrecorded)
    monkeypatch.setattr(Unrecorded, "made", [])
    engine = BatchScheduler(load_model(checkpoint, torch.float64), LIMITS, "1")
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    runner._graphs = DecodeGraphs(engine.model, engine._kv)  # type: ignore[arg-type]
    found = sampled(engine)
    for (ids, logprobs), (expected_ids, expected_logprobs) in zip(found, expected, strict=True):
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-6)
    made = Unrecorded.made
    assert 1 < len(made) < sum(recorded.num_replayed for recorded in made) / 3


def test_a_step_asks_the_device_for_nothing(checkpoint: Path) -> None:
    """A graph cannot be recorded across an operation that the host waits for."""
    engine = BatchScheduler(load_model(checkpoint, torch.float32), LIMITS, "1")
    step = DecodeStep(engine.model, engine._kv.tensor, 4, 256)  # type: ignore[union-attr]
    with torch.inference_mode(), Operations() as operations:
        step.compute()
    assert operations.counts["linear"] + operations.counts["mm"] > 0
    assert not {"_local_scalar_dense", "nonzero", "is_nonzero", "item"} & operations.counts.keys()


@pytest.mark.parametrize(
    ("num_rows", "length", "expected"),
    [(1, 1, (1, 256)), (3, 257, (4, 512)), (5, 600, (6, 700)), (6, 700, (6, 700))],
)
def test_shapes_are_powers_of_two_within_the_cache(
    num_rows: int, length: int, expected: tuple[int, int]
) -> None:
    assert graph_shape(torch.empty(1, 2, 6, 1, 700, 1), num_rows, length) == expected
