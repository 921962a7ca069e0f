"""Drawing tokens, against hand-made distributions."""

from typing import Any

import numpy as np
import pytest
import torch

from agentrl.plugins.engine.generation.token_sampling import SamplingBatch, truncate, uniforms
from agentrl.plugins.engine.generation.token_sequence import DrawParams, TokenSequence

VOCAB = 5
PROBS = [0.4, 0.3, 0.2, 0.06, 0.04]


def sequence(prompt_length: int = 3, **params: Any) -> TokenSequence:
    prompt = np.zeros(prompt_length, dtype=np.int32)
    return TokenSequence.start("r", prompt, DrawParams(**({"max_new_tokens": 50} | params)))


def logits(count: int) -> torch.Tensor:
    return torch.tensor(PROBS).log().repeat(count, 1)


def frequencies(num_draws: int = 20_000, **params: Any) -> np.ndarray:
    sequences = [sequence(seed=seed, **params) for seed in range(num_draws)]
    tokens, _ = SamplingBatch(sequences, VOCAB).draw(logits(num_draws))
    return np.bincount(tokens, minlength=VOCAB) / num_draws


def test_tokens_are_drawn_with_their_probabilities() -> None:
    np.testing.assert_allclose(frequencies(), PROBS, atol=0.015)


def test_temperature_sharpens() -> None:
    expected = np.array(PROBS) ** 2 / (np.array(PROBS) ** 2).sum()
    np.testing.assert_allclose(frequencies(temperature=0.5), expected, atol=0.015)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_p": 0.71}, 3),
        ({"top_p": 0.69}, 2),
        ({"min_p": 0.4}, 3),
        ({"top_k": 3, "top_p": 0.35}, 1),
    ],
    ids=str,
)
def test_truncation_keeps_the_likeliest_in_proportion(params: dict[str, Any], kept: int) -> None:
    expected = np.array(PROBS)
    expected[kept:] = 0
    np.testing.assert_allclose(frequencies(**params), expected / expected.sum(), atol=0.015)


def test_logprob_is_after_temperature_and_before_truncation() -> None:
    [token], [logprob] = SamplingBatch([sequence(temperature=2.0, top_k=1)], VOCAB).draw(logits(1))
    assert token == 0
    assert logprob == pytest.approx(np.log(0.4), abs=1e-5)  # top_k 1 is greedy: raw
    scaled = np.array(PROBS) ** 0.5 / (np.array(PROBS) ** 0.5).sum()
    [token], [logprob] = SamplingBatch([sequence(temperature=2.0, top_k=2)], VOCAB).draw(logits(1))
    assert logprob == pytest.approx(np.log(scaled[token]), abs=1e-5)


def test_greedy_takes_the_likeliest_with_raw_logprob() -> None:
    batch = SamplingBatch([sequence(temperature=0.0), sequence(temperature=1.0)], VOCAB)
    tokens, logprobs = batch.draw(logits(2))
    assert tokens[0] == 0
    assert logprobs[0] == pytest.approx(np.log(0.4), abs=1e-5)


def test_token_without_probability_is_never_drawn() -> None:
    impossible = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf"), float("-inf")]])
    sequences = [sequence(seed=seed) for seed in range(5000)]
    tokens, _ = SamplingBatch(sequences, VOCAB).draw(impossible.repeat(5000, 1))
    assert set(tokens) == {1, 2}


def test_overflown_logits_give_a_logprob_that_tells() -> None:
    broken = torch.full((1, VOCAB), float("nan"))
    [token], [logprob] = SamplingBatch([sequence()], VOCAB).draw(broken)
    assert 0 <= token < VOCAB
    assert np.isnan(logprob)


def test_draw_depends_on_seed_and_position_only() -> None:
    alone = SamplingBatch([sequence(seed=3)], VOCAB).draw(logits(1))[0]
    crowd = [sequence(seed=seed) for seed in (1, 2, 3, 4)]
    assert SamplingBatch(crowd, VOCAB).draw(logits(4))[0][2] == alone[0]
    moved = [sequence(prompt_length=length, seed=3) for length in range(3, 60)]
    assert len(set(SamplingBatch(moved, VOCAB).draw(logits(57))[0])) > 1


def test_noise_is_uniform_and_below_one() -> None:
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 500)
    positions = np.tile(np.arange(500, dtype=np.uint64), 200)
    noise = uniforms(seeds, positions)
    assert 0 <= noise.min() < 0.001
    assert 0.999 < noise.max() < 1
    histogram = np.histogram(noise, bins=20, range=(0, 1))[0] / len(noise)
    np.testing.assert_allclose(histogram, 0.05, atol=0.003)
    grid = noise.reshape(200, 500)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.01


def test_cut_off_tokens_get_probability_zero_in_place() -> None:
    probs = torch.tensor([[0.1, 0.5, 0.4]])
    kept = truncate(probs, torch.tensor([2]), torch.tensor([1.0]), torch.tensor([0.0]))
    np.testing.assert_allclose(kept, [[0.0, 0.5, 0.4]])


def edited(sequence: TokenSequence) -> list[float]:
    """Return the logprobs that the sequence's parameters lead to, from all-zero logits."""
    values = torch.zeros(1, VOCAB)
    SamplingBatch([sequence], VOCAB).draw(values)
    return values[0].tolist()


def test_penalties_count_what_was_sampled() -> None:
    penalised = sequence(frequency_penalty=0.5, presence_penalty=0.25)
    for token in (1, 1, 3):
        penalised.append(token, 0.0, "0")
    assert edited(penalised) == pytest.approx([0, -1.25, 0, -0.75, 0])


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    repeated = sequence(repetition_penalty=2.0)
    repeated.append(0, 0.0, "0")
    repeated.append(1, 0.0, "0")
    values = torch.tensor([[1.0, -1.0, 1.0, -1.0, 0.0]])
    SamplingBatch([repeated], VOCAB).draw(values)
    assert values[0].tolist() == pytest.approx([0.5, -2.0, 1.0, -1.0, 0.0])


def test_penalties_follow_the_tokens_that_a_batch_draws() -> None:
    greedy = sequence(temperature=0.0, presence_penalty=2.0)
    batch = SamplingBatch([greedy], VOCAB)
    drawn = []
    for _ in range(VOCAB):
        tokens, _logprobs = batch.draw(logits(1))
        greedy.append(tokens[0], 0.0, "0")
        drawn += tokens
    assert drawn[:3] == [0, 1, 2]
    fresh = SamplingBatch([greedy], VOCAB)
    assert fresh.draw(logits(1)) == batch.draw(logits(1))


def test_bias_and_minimum_length() -> None:
    sequence_ = sequence(min_new_tokens=2, stop_ids=frozenset({4}), logit_bias={2: 1.5})
    assert edited(sequence_) == [0, 0, 1.5, 0, float("-inf")]
    sequence_.append(0, 0.0, "0")
    sequence_.append(0, 0.0, "0")
    assert edited(sequence_) == [0, 0, 1.5, 0, 0]
