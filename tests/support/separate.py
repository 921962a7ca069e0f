"""The oracle of merged training: every turn in a row of its own, through stock transformers.

Independent of trees, layouts, target tokens and micro-batches. Turns are padded on the right, where
causal attention does not look; losses are written down from their formulas.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from harness.trees import flat_gradient

from agentrl.data.select import SelectedGroup
from agentrl.data.tokens import TurnTokens
from agentrl.models.policy import PolicyModel
from agentrl.models.unrounded import unrounded

LOWER, UPPER = 0.8, 1.3
"""GRPO's clip range as the flags have it by default."""
LOWEST, HIGHEST = 0.2, 2.2
"""Beyond these ratios a token that pushes outwards is dropped."""


def separate_gradient(
    policy: PolicyModel,
    groups: Sequence[SelectedGroup],
    *,
    kind: str = "GRPO",
    autocast: torch.autocast | None = None,
) -> tuple[float, torch.Tensor]:
    """Loss and flat gradient of all turns, averaged over sampled tokens."""
    turns = [turn for group in groups for turn in group.turns]
    policy.zero_grad(set_to_none=True)
    with autocast or torch.autocast("cpu", enabled=False):
        logits = _logits(policy, turns)
    total = torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
    for number, turn in enumerate(turns):
        logprobs = _logprobs(logits[number].to(total.dtype), turn)
        if kind == "REINFORCE":
            total = total - turn.advantage * logprobs.sum()
            continue
        ratio = (logprobs - torch.from_numpy(turn.behavior_logprobs)).exp()
        surrogate = torch.minimum(
            ratio * turn.advantage, ratio.clamp(LOWER, UPPER) * turn.advantage
        )
        dropped = ratio > HIGHEST if turn.advantage > 0 else ratio < LOWEST
        total = total - surrogate[~dropped].sum()
    loss = total / sum(turn.num_targets for turn in turns)
    loss.backward()
    gradient = flat_gradient(policy)
    policy.zero_grad(set_to_none=True)
    return loss.item(), gradient


@torch.no_grad()
def sampled_by(
    policy: PolicyModel, groups: Sequence[SelectedGroup], *, noise: float = 0.3, seed: int = 0
) -> list[SelectedGroup]:
    """The groups as if a policy nearby had sampled them; some ratios are beyond the clip range."""
    rng = np.random.default_rng(seed)
    found = []
    for group in groups:
        turns = []
        for turn, logits in zip(group.turns, _logits(policy, group.turns), strict=True):
            shift = rng.normal(scale=noise, size=turn.num_targets)
            behavior = (_logprobs(logits, turn).numpy() + shift).astype(np.float32)
            turns.append(replace(turn, behavior_logprobs=behavior))
        found.append(replace(group, turns=tuple(turns)))
    return found


def _logits(policy: PolicyModel, turns: Sequence[TurnTokens]) -> torch.Tensor:
    ids = np.zeros((len(turns), max(len(turn.full_ids) for turn in turns)), dtype=np.int64)
    for number, turn in enumerate(turns):
        ids[number, : len(turn.full_ids)] = turn.full_ids
    implementation = policy.model.config._attn_implementation
    policy.model.set_attn_implementation("sdpa")
    with unrounded(policy.model.dtype):
        output = policy.model(input_ids=torch.from_numpy(ids), use_cache=False)
    logits: torch.Tensor = output.logits
    policy.model.set_attn_implementation(implementation)
    return logits


def _logprobs(logits: torch.Tensor, turn: TurnTokens) -> torch.Tensor:
    rows = logits[turn.num_prompt_tokens - 1 : len(turn.full_ids) - 1]
    sampled = torch.from_numpy(turn.output_ids.astype(np.int64))[:, None]
    temperature = np.float32(turn.temperature).item()
    return (rows / temperature).log_softmax(-1).gather(1, sampled)[:, 0]
