"""Checks merged training: gradients of merged turns against those of separate turns.

`check_merge` compares the two packings of a training step (`--verify_merge`); `check_random_trees`
compares random groups on small models (`agentrl verify merge`). Separate turns go through
transformers' own model, one per forward pass: no code for token trees is on both sides.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.config.sections import AlgorithmSection
from agentrl.data import MicroBatch, SelectedGroup, TokenTree, build_step
from agentrl.data.random_groups import random_group
from agentrl.data.rows import Merge
from agentrl.distributed import Ranks, Stages, squared_norms
from agentrl.models.attention.attention_registry import (
    TREE_ATTENTION,
    with_own_attention,
)
from agentrl.models.load import wrap_policy
from agentrl.models.policy import PolicyModel, target_logprobs
from agentrl.trainer.learner.passes import forward_backward

STEP_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.04}
"""Relative gradient error, by compute precision, beyond which a training step counts as wrong.

The mildest known bug of merged training changes a gradient by 0.044."""
TREE_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""The same for random trees, which are smaller."""

_SMALL_MODEL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
_NUM_WORST_PARAMETERS = 5


@dataclass(frozen=True)
class MergeCheck:
    """The error of the gradient of merged turns against that of separate turns."""

    relative_error: float
    """Norm of the difference over the norm of the separate gradient."""
    tolerance: float
    loss_merged: float
    loss_separate: float
    worst: tuple[tuple[str, float], ...]
    """Parameters with the largest individual relative errors."""

    @property
    def is_equal(self) -> bool:
        """Whether the error is within the tolerance (NaN is not)."""
        return self.relative_error <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"equal": self.is_equal, **asdict(self), "worst": dict(self.worst)}


Accumulate = Callable[[Sequence[MicroBatch]], float]
"""Adds the gradients of micro-batches to the parameters and returns their share of the loss."""


def check_merge(
    policy: PolicyModel,
    merged: Sequence[MicroBatch],
    separate: Sequence[MicroBatch],
    *,
    accumulate: Accumulate,
    tolerance: float,
    ranks: Ranks,
    stages: Stages | None = None,
) -> MergeCheck:
    """Compare the gradients of two packings of one step (collective); leaves no gradient behind.

    Args:
        policy: the model whose parameters are compared, sharded or not.
        merged: this rank's micro-batches as used in training.
        separate: this rank's micro-batches of the same turns, one per row.
        accumulate: the trainer's forward and backward pass.
        tolerance: largest relative error that counts as equal.
        ranks: all ranks that share the step.
        stages: the stages of the pipeline, if the policy is one of them; the worst parameters are then
            those of the first stage.
    """
    merged_loss, gradients = _gradients(policy, merged, accumulate)
    # If the ranks of a row see only some of its tokens, AgentRL's layers exchange the others, which
    # transformers' own layers cannot.
    with nullcontext() if policy.split.is_followed else with_own_attention(policy.model):
        separate_loss, expected = _gradients(policy, separate, accumulate)
    names = [name for name, trained in policy.named_parameters() if trained.requires_grad]
    # A tied head counts as the embedding that it shares.
    is_counted = [policy.stage.number == 0 or not policy.stage.is_tied(name) for name in names]
    pairs = zip(gradients, expected, strict=True)
    differences = squared_norms([one - other for one, other in pairs])
    norms = squared_norms(expected)
    merged_loss, separate_loss = ranks.sum([merged_loss, separate_loss])
    totals = [sum(compress(squares, is_counted)) for squares in (differences, norms)]
    if stages is not None:
        totals = stages.sum(totals)
    errors = {
        name: _relative_error(difference, norm)
        for name, difference, norm in zip(names, differences, norms, strict=True)
    }
    return MergeCheck(
        relative_error=_relative_error(*totals),
        tolerance=tolerance,
        loss_merged=merged_loss,
        loss_separate=separate_loss,
        worst=tuple(sorted(errors.items(), key=lambda item: -item[1])[:_NUM_WORST_PARAMETERS]),
    )


@dataclass(frozen=True)
class TreesCheck:
    """Outcome of a comparison on random trees."""

    max_relative_gradient_error: float
    by_packing: dict[str, float]
    """Largest error of whole trees (`tree`), records merged separately (`linear`), turns side by side
    in a row (`packed`), trees cut into bins with repeated prefixes (`bins`), and trees in chunks
    (`chunks`)."""
    trees: int
    tokens_separate: int
    tokens_merged: int
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """Whether the largest error is within the tolerance."""
        return self.max_relative_gradient_error <= self.tolerance


def check_random_trees(policies: Sequence[PolicyModel], *, seed: int, trees: int) -> TreesCheck:
    """Compare merged with separate turns on random groups.

    Each separate turn goes through transformers' own attention, in plain causal rows.

    Args:
        policies: used in rotation; all of one precision, float64 or float32.
        seed: seed of the groups.
        trees: number of groups.
    """
    errors: dict[str, float] = {}
    tokens_separate = tokens_merged = 0
    for number in range(trees):
        policy = policies[number % len(policies)]
        rng = np.random.default_rng([seed, number])
        group = random_group(
            rng,
            vocabulary=policy.model.config.vocab_size,
            num_records=int(rng.integers(2, 9)),
            num_turns=int(rng.integers(1, 21)),
        )
        group = _with_near_behavior(policy, group, rng)
        for packing, error in packing_errors(policy, group).items():
            # Python's `max` would ignore NaN.
            errors[packing] = float(np.maximum(errors.get(packing, 0.0), error))
        tree = TokenTree.from_tokens(group.turns)
        tokens_separate += tree.num_flat_tokens
        tokens_merged += tree.num_tokens
    return TreesCheck(
        max_relative_gradient_error=float(np.max(list(errors.values()))),
        by_packing=errors,
        trees=trees,
        tokens_separate=tokens_separate,
        tokens_merged=tokens_merged,
        tolerance=TREE_TOLERANCE[policies[0].model.dtype],
    )


def packing_errors(
    policy: PolicyModel, group: SelectedGroup, algorithm: AlgorithmSection | None = None
) -> dict[str, float]:
    """Return the relative gradient error of a group in each packing of `TreesCheck`.

    Args:
        policy: the model whose gradients are compared.
        group: the turns.
        algorithm: loss settings; the defaults if None.
    """
    accumulate = _plain_accumulate(policy, algorithm or AlgorithmSection())
    expected = separate_gradient(policy, group, algorithm)
    longest = max(len(turn.path) for turn in group.turns)
    packings: dict[str, tuple[Merge, int]] = {
        "tree": ("tree", 10**9),
        "linear": ("linear", 10**9),
        "packed": ("packed", 10**9),
        "bins": ("tree", longest),
        "chunks": ("tree", max(1, longest // 3)),
    }
    errors = {}
    for packing, (merge, token_budget) in packings.items():
        step = build_step([group], policy_version=3, token_budget=token_budget, merge=merge)
        _, gradients = _gradients(policy, step.micro_batches[0], accumulate)
        errors[packing] = float((_flattened(gradients) - expected).norm() / expected.norm())
    return errors


def separate_gradient(
    policy: PolicyModel, group: SelectedGroup, algorithm: AlgorithmSection | None = None
) -> torch.Tensor:
    """Return the gradient [parameters] of a group's turns, each alone in transformers' layers.

    Args:
        policy: the model.
        group: the turns.
        algorithm: loss settings; the defaults if None.
    """
    accumulate = _plain_accumulate(policy, algorithm or AlgorithmSection())
    with with_own_attention(policy.model):
        _, gradients = _gradients(policy, _one_turn_rows(group), accumulate)
    return _flattened(gradients)


def small_random_policies(dtype: torch.dtype, device: torch.device) -> list[PolicyModel]:
    """Return a Qwen3 and a Llama of two layers with random weights."""
    torch.manual_seed(0)
    qwen = Qwen3ForCausalLM(Qwen3Config(**_SMALL_MODEL, tie_word_embeddings=True))
    llama = LlamaForCausalLM(LlamaConfig(**_SMALL_MODEL, tie_word_embeddings=False))
    policies = []
    for model in (qwen, llama):
        model.set_attn_implementation(TREE_ATTENTION)
        model.to(device=device, dtype=dtype)  # type: ignore[call-arg]
        policies.append(wrap_policy(model))
    return policies


def _gradients(
    policy: nn.Module, batches: Sequence[MicroBatch], accumulate: Accumulate
) -> tuple[float, list[torch.Tensor]]:
    policy.zero_grad(set_to_none=True)
    loss = accumulate(batches)
    gradients = []
    for parameter in policy.parameters():
        if parameter.requires_grad:
            # Some families have parameters that the forward pass does not use.
            gradient = parameter.grad
            gradients.append(torch.zeros_like(parameter) if gradient is None else gradient)
    policy.zero_grad(set_to_none=True)
    return loss, gradients


def _relative_error(difference: float, norm: float) -> float:
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return math.sqrt(difference / norm)


def _plain_accumulate(policy: PolicyModel, algorithm: AlgorithmSection) -> Accumulate:
    def accumulate(batches: Sequence[MicroBatch]) -> float:
        autocast = torch.autocast(policy.device.type, dtype=torch.bfloat16, enabled=False)
        return sum(
            forward_backward(policy, batch, algorithm, chunk_size=4096, autocast=autocast).loss
            for batch in batches
        )

    return accumulate


def _one_turn_rows(group: SelectedGroup) -> list[MicroBatch]:
    """Return every turn as a separate row, weighted as in the whole group."""
    num_targets = sum(turn.num_targets for turn in group.turns)
    rows = []
    for turn in group.turns:
        single = replace(group, turns=(turn,))
        step = build_step([single], policy_version=3, token_budget=10**9)
        ((batch,),) = step.micro_batches
        rows.append(replace(batch, weights=np.full(turn.num_targets, 1.0 / num_targets)))
    return rows


def _with_near_behavior(
    policy: PolicyModel, group: SelectedGroup, rng: np.random.Generator
) -> SelectedGroup:
    """Return the group with behavior logprobs near the policy's, some beyond the clip range."""
    turns = []
    with torch.no_grad(), with_own_attention(policy.model):
        for turn, batch in zip(group.turns, _one_turn_rows(group), strict=True):
            logprobs = target_logprobs(policy, batch.row).logprobs.cpu().numpy()
            noise = rng.normal(scale=0.3, size=turn.num_targets)
            behavior = (logprobs + noise).astype(np.float32)
            turns.append(replace(turn, behavior_logprobs=behavior))
    return replace(group, turns=tuple(turns))


def _flattened(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])
