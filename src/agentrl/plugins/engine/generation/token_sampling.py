"""Draw the next token of every sequence of a step at once.

Logprobs are `log_softmax(logits / temperature)` after penalties and before truncation, which is
what importance ratios need; a greedy sequence reports the raw `log_softmax`. If a grammar
constrains a sequence, logprobs are normalized over the tokens that it allows, as in SGLang, because
the token was drawn from these alone.

Shape legend: B sequences, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from agentrl.plugins.engine.generation.grammars import GrammarConstraint
from agentrl.plugins.engine.generation.token_sequence import TokenSequence


class SamplingBatch:
    """The sampling parameters of a list of sequences as tensors; rebuilt when the list changes."""

    def __init__(self, sequences: Sequence[TokenSequence], vocab_size: int) -> None:
        params = [sequence.params for sequence in sequences]
        self.sequences = list(sequences)
        self._seeds = np.array([p.seed % 2**64 for p in params], dtype=np.uint64)
        self._greedy = torch.tensor([p.is_greedy for p in params])
        self._all_greedy = all(p.is_greedy for p in params)
        self._any_greedy = any(p.is_greedy for p in params)
        temperatures = [1.0 if p.is_greedy else p.temperature for p in params]
        self._temperatures = torch.tensor(temperatures).unsqueeze(1)
        self._is_scaled = any(temperature != 1.0 for temperature in temperatures)
        self._truncated = [row for row, p in enumerate(params) if p.is_truncated]
        truncated_params = [params[row] for row in self._truncated]
        self._top_k = torch.tensor(
            [p.top_k if p.top_k > 0 else vocab_size for p in truncated_params]
        )
        self._top_p = torch.tensor([p.top_p for p in truncated_params])
        self._min_p = torch.tensor([p.min_p for p in truncated_params])
        edited = [row for row, p in enumerate(params) if p.is_edited]
        self._edits = LogitEdits(sequences, edited, vocab_size) if edited else None
        constraints = [
            (row, s.constraint) for row, s in enumerate(sequences) if s.constraint is not None
        ]
        self._grammars = GrammarMasks(constraints, vocab_size) if constraints else None

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Draw one token per sequence.

        Raw logits, float [B, V], are changed in place if sequences require it.
        """
        logits = logits.float()
        if self._edits is not None:
            self._edits.apply(logits)
        if self._grammars is not None:
            self._grammars.apply(logits)
        scaled = logits / self._temperatures if self._is_scaled else logits
        logprobs = torch.log_softmax(scaled, dim=-1)
        if self._all_greedy:
            tokens = logprobs.argmax(dim=-1)
        else:
            tokens = self._inverse_cdf(logprobs.exp())
            if self._any_greedy:
                tokens = torch.where(self._greedy, logprobs.argmax(dim=-1), tokens)
        if self._edits is not None:
            self._edits.count(tokens)
        drawn = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return tokens.tolist(), drawn.tolist()

    def _inverse_cdf(self, probs: torch.Tensor) -> torch.Tensor:
        if self._truncated:
            rows = torch.tensor(self._truncated)
            probs[rows] = truncate(probs[rows], self._top_k, self._top_p, self._min_p)
        cdf = probs.cumsum(dim=-1)
        totals = cdf[:, -1:]
        positions = np.array([sequence.length for sequence in self.sequences], dtype=np.uint64)
        noise = torch.as_tensor(uniforms(self._seeds, positions)).unsqueeze(1)
        # Strictly below the total, so that the token always has a probability above 0.
        thresholds = torch.minimum(noise * totals, totals.nextafter(torch.zeros(())))
        tokens = torch.searchsorted(cdf, thresholds, right=True).squeeze(1)
        # Only rows of NaN, from overflowing weights, lead past the end; their logprobs are NaN.
        return tokens.clamp_(max=cdf.shape[1] - 1)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1) that depend on seed and position only, float32 [B].

    The generator is splitmix64, evaluated at the position. Seeds and positions are uint64 [B].
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds) + positions * np.uint64(0x9E3779B97F4A7C15)
        bits = _mix(state) >> np.uint64(40)
    return np.ldexp(bits.astype(np.float32), -24)


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def truncate(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return the probabilities with cut-off tokens set to 0; rows are not normalized again.

    At most `top_k` tokens stay, int64 [B]. A token stays while those before it hold at most `top_p`,
    float [B], if it has the share `min_p` of the likeliest token's probability, float [B].
    """
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ranks = torch.arange(probs.shape[1])
    is_cut_off = (
        (ranks >= top_k.unsqueeze(1))
        | (before > top_p.unsqueeze(1))
        | (ordered < ordered[:, :1] * min_p.unsqueeze(1))
    )
    return torch.zeros_like(probs).scatter(1, order, ordered.masked_fill(is_cut_off, 0.0))


class LogitEdits:
    """Penalties for output so far, biases and minimum lengths of some rows of a batch.

    Counts drawn tokens, so it is valid for one list of sequences only.
    """

    def __init__(
        self, sequences: Sequence[TokenSequence], rows: list[int], vocab_size: int
    ) -> None:
        self._sequences = [sequences[row] for row in rows]
        self._rows = torch.tensor(rows)
        params = [sequence.params for sequence in self._sequences]
        self._counts = torch.stack(
            [_counts(sequence.output_ids, vocab_size) for sequence in self._sequences]
        )
        self._frequency = torch.tensor([p.frequency_penalty for p in params]).unsqueeze(1)
        self._presence = torch.tensor([p.presence_penalty for p in params]).unsqueeze(1)
        self._repetition = torch.tensor([p.repetition_penalty for p in params]).unsqueeze(1)
        self._stops = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
        self._bias = torch.zeros(len(rows), vocab_size)
        for row, p in enumerate(params):
            self._stops[row, list(p.stop_ids)] = True
            self._bias[row, list(p.logit_bias)] = torch.tensor(list(p.logit_bias.values()))

    def apply(self, logits: torch.Tensor) -> None:
        """Change the logits [B, V] of the rows in place."""
        seen = self._counts > 0
        values = logits[self._rows] + self._bias - self._frequency * self._counts
        values -= self._presence * seen
        factors = torch.where(seen, self._repetition, 1.0)
        values = torch.where(values < 0, values * factors, values / factors)
        too_short = torch.tensor(
            [len(s.output_ids) < s.params.min_new_tokens for s in self._sequences]
        )
        values.masked_fill_(self._stops & too_short.unsqueeze(1), float("-inf"))
        logits[self._rows] = values

    def count(self, tokens: torch.Tensor) -> None:
        """Count the drawn tokens [B]."""
        drawn = tokens[self._rows]
        self._counts[torch.arange(len(drawn)), drawn] += 1


class GrammarMasks:
    """Masks, in some rows of a batch, the tokens that their grammars do not allow."""

    def __init__(
        self, constraints: Sequence[tuple[int, GrammarConstraint]], vocab_size: int
    ) -> None:
        self._constraints = [grammar for _, grammar in constraints]
        self._rows = torch.tensor([row for row, _ in constraints])
        self._vocab_size = vocab_size
        self._bits = np.zeros((len(constraints), (vocab_size + 31) // 32), dtype="<i4")

    def apply(self, logits: torch.Tensor) -> None:
        """Set the logits [B, V] of tokens that may not come next to -inf, in place."""
        for row, grammar in enumerate(self._constraints):
            grammar.allow_next(self._bits, row)
        allowed = np.unpackbits(
            self._bits.view(np.uint8), axis=1, bitorder="little", count=self._vocab_size
        )
        forbidden = torch.as_tensor(allowed == 0)
        logits[self._rows] = logits[self._rows].masked_fill(forbidden, float("-inf"))


def _counts(ids: list[int], vocab_size: int) -> torch.Tensor:
    counts = np.bincount(np.asarray(ids, dtype=np.int64), minlength=vocab_size)
    return torch.as_tensor(counts.astype(np.float32))
