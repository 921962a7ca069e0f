"""Families that keep more than keys and values: their samples have the trainer's logprobs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.tiny_families import VOCABULARY, tiny_model
from transformers import PreTrainedModel

from agentrl.plugins.engine.generation.batch_scheduler import BatchScheduler, SchedulerLimits
from agentrl.plugins.engine.generation.model_caches import ModelCaches
from agentrl.plugins.engine.generation.model_runner import load_model
from agentrl.plugins.engine.generation.token_sequence import DrawParams, TokenSequence

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*falling back to its reference PyTorch implementation"
)
LIMITS = SchedulerLimits(
    max_running=3,
    max_queued=64,
    context_length=128,
    prefill_tokens_per_step=7,
    kv_cache_bytes=1 << 24,
    prefix_cache_bytes=1 << 24,
)


def served(path: Path, family: str) -> tuple[BatchScheduler, PreTrainedModel]:
    """An engine of a family's tiny model, and the model beside it."""
    tiny_model(family, torch.float32).save_pretrained(path)
    return BatchScheduler(load_model(path, torch.float32), LIMITS, "1"), load_model(
        path, torch.float32
    )


def sample(
    scheduler: BatchScheduler, prompts: Sequence[list[int]], *, scored: bool = False
) -> list[TokenSequence]:
    sequences = [
        TokenSequence.start(
            f"{len(prompt)}/{number}",
            np.array(prompt, dtype=np.int32),
            DrawParams(max_new_tokens=6, seed=number),
            prompt_logprobs_from=0 if scored else -1,
        )
        for number, prompt in enumerate(prompts)
    ]
    scheduler.submit_all(sequences)
    while scheduler.has_work:
        scheduler.step()
    return sequences


@torch.no_grad()
def own_logprobs(model: PreTrainedModel, sequence: TokenSequence) -> np.ndarray:
    ids = torch.from_numpy(sequence.tokens[: sequence.length].astype(np.int64))[None]
    scores = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    found: np.ndarray = scores[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    return found


@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h", "lfm2"])
def test_logprobs_of_first_and_later_turns_are_the_models_own(tmp_path: Path, family: str) -> None:
    scheduler, model = served(tmp_path, family)
    assert isinstance(scheduler._kv, ModelCaches)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, size=size).tolist() for size in (20, 1, 9, 15)]
    first = sample(scheduler, prompts, scored=True)
    later = sample(scheduler, [[*s.tokens[: s.length].tolist(), 3, 4, 5] for s in first])
    # All but the last sampled token was computed, and is continued.
    assert [s.num_cached for s in later] == [s.length - 1 if s.length > 8 else 0 for s in first]
    for sequence in (*first, *later):
        expected = own_logprobs(model, sequence)
        sampled = expected[sequence.num_prompt - 1 :]
        assert np.abs(sampled - sequence.output_logprobs).max() < 1e-4
    for sequence in first:
        assert len(sequence.prompt_logprobs) == sequence.num_prompt - 1
        expected = own_logprobs(model, sequence)[: sequence.num_prompt - 1]
        assert np.abs(expected - np.array(sequence.prompt_logprobs)).max(initial=0.0) < 1e-4


def test_a_state_is_not_continued_from_its_middle(tmp_path: Path) -> None:
    scheduler, model = served(tmp_path, "lfm2")
    prompt = list(range(20))
    (whole,) = sample(scheduler, [prompt])
    (edited,) = sample(scheduler, [[*prompt, 39, 39, 39]])
    assert whole.output_ids[0] != 39
    assert edited.num_cached == 0
    found = own_logprobs(model, edited)[edited.num_prompt - 1 :]
    assert np.abs(found - edited.output_logprobs).max() < 1e-4
