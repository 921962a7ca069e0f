"""Draw the next token of every sequence of a step at once.

Logprobs are `log_softmax(logits / temperature)` after penalties and before truncation, which is
what importance ratios need; a greedy sequence reports the raw `log_softmax`.

Shape legend: B sequences, V vocabulary.
"""

from collections.abc import Sequence as Many

import numpy as np
import torch

from agentrl.inference.engine.sequence import Sequence


class SamplingBatch:
    """The sampling parameters of a list of sequences as tensors; made anew when the list changes."""

    def __init__(self, sequences: Many[Sequence], vocab_size: int) -> None:
        params = [sequence.params for sequence in sequences]
        self.sequences = list(sequences)
        self._vocab_size = vocab_size
        self._seeds = np.array([p.seed % 2**64 for p in params], dtype=np.uint64)
        self._greedy = torch.tensor([p.is_greedy for p in params])
        self._all_greedy = all(p.is_greedy for p in params)
        self._any_greedy = any(p.is_greedy for p in params)
        temperatures = [1.0 if p.is_greedy else p.temperature for p in params]
        self._temperatures = torch.tensor(temperatures).unsqueeze(1)
        self._is_scaled = any(temperature != 1.0 for temperature in temperatures)
        self._truncated = [row for row, p in enumerate(params) if p.is_truncated]
        cut = [params[row] for row in self._truncated]
        self._top_k = torch.tensor([p.top_k if p.top_k > 0 else vocab_size for p in cut])
        self._top_p = torch.tensor([p.top_p for p in cut])
        self._min_p = torch.tensor([p.min_p for p in cut])
        self._edited = [row for row, p in enumerate(params) if p.is_edited]

    def draw(self, logits_BV: torch.Tensor) -> tuple[list[int], list[float]]:
        """Draw one token a sequence.

        Args:
            logits_BV: raw logits, float [B, V]; changed in place where sequences ask for it.

        Returns:
            Token ids and their logprobs.
        """
        logits_BV = logits_BV.float()
        for row in self._edited:
            edit_logits(logits_BV[row], self.sequences[row])
        scaled_BV = logits_BV / self._temperatures if self._is_scaled else logits_BV
        logprobs_BV = torch.log_softmax(scaled_BV, dim=-1)
        if self._all_greedy:
            tokens = logprobs_BV.argmax(dim=-1)
        else:
            tokens = self._inverse_cdf(logprobs_BV.exp())
            if self._any_greedy:
                tokens = torch.where(self._greedy, logprobs_BV.argmax(dim=-1), tokens)
        drawn = logprobs_BV.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return tokens.tolist(), drawn.tolist()

    def _inverse_cdf(self, probs_BV: torch.Tensor) -> torch.Tensor:
        if self._truncated:
            rows = torch.tensor(self._truncated)
            probs_BV[rows] = truncate(probs_BV[rows], self._top_k, self._top_p, self._min_p)
        cdf_BV = probs_BV.cumsum(dim=-1)
        totals = cdf_BV[:, -1:]
        positions = np.array([sequence.length for sequence in self.sequences], dtype=np.uint64)
        noise = torch.from_numpy(uniforms(self._seeds, positions)).unsqueeze(1)
        # Strictly below the total, so that the token found always has a probability above 0.
        thresholds = torch.minimum(noise * totals, totals.nextafter(torch.zeros(())))
        return torch.searchsorted(cdf_BV, thresholds, right=True).squeeze(1)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1) that depend on seed and position only, float32 [B].

    The generator is splitmix64, read at the place that the position names.

    Args:
        seeds: uint64 [B].
        positions: uint64 [B].
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds) + positions * np.uint64(0x9E3779B97F4A7C15)
        bits = _mix(state) >> np.uint64(40)
    return (bits.astype(np.float32)) * np.float32(2.0**-24)


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def truncate(
    probs_BV: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return the probabilities with cut-off tokens set to 0; rows are not normalised again.

    Args:
        probs_BV: probabilities.
        top_k: int64 [B], tokens that stay at most.
        top_p: float [B]; a token stays while those before it hold at most this much.
        min_p: float [B], share of the likeliest token's probability that a token needs.
    """
    ordered, order = probs_BV.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ranks = torch.arange(probs_BV.shape[1])
    cut = (
        (ranks >= top_k.unsqueeze(1))
        | (before > top_p.unsqueeze(1))
        | (ordered < ordered[:, :1] * min_p.unsqueeze(1))
    )
    return torch.zeros_like(probs_BV).scatter(1, order, ordered.masked_fill(cut, 0.0))


def edit_logits(logits_V: torch.Tensor, sequence: Sequence) -> None:
    """Apply penalties (over the output so far), bias and the minimum length, in place."""
    params = sequence.params
    if sequence.output_ids:
        ids, counts = torch.tensor(sequence.output_ids).unique(return_counts=True)
        values = logits_V[ids] - params.frequency_penalty * counts - params.presence_penalty
        factor = params.repetition_penalty
        logits_V[ids] = torch.where(values < 0, values * factor, values / factor)
    for token, bias in params.logit_bias.items():
        logits_V[token] += bias
    if len(sequence.output_ids) < params.min_new_tokens:
        logits_V[list(params.stop_ids)] = float("-inf")
