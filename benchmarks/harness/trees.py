"""Random groups with branching contexts, and tiny models to run them through."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.config.sections import AlgorithmSection
from agentrl.data.batch import StepBatch
from agentrl.data.select import SelectedGroup
from agentrl.data.shown_images import ShownImage
from agentrl.models.load import wrap_policy
from agentrl.models.policy import PolicyModel
from agentrl.models.router_replay import make_routers_replay
from agentrl.schema import (
    DBRecordData,
    DispatchedSamplingTask,
    SamplingParams,
    Score,
    VersionSpan,
)
from agentrl.trainer.learner.passes import forward_backward
from harness import random_groups

NO_AUTOCAST = torch.autocast("cpu", enabled=False)
VOCABULARY = 40
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}

_TIED = {"tie_word_embeddings": True}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": _TIED,
    "qwen3_moe": {**_TIED, **_EXPERTS},
    "llama": {"tie_word_embeddings": False},
    "qwen2": _TIED,
    "mistral": {"sliding_window": None, "tie_word_embeddings": False},
}
"""What the configurations of some architectures add."""


def tiny_policy(
    architecture: str = "qwen3",
    dtype: torch.dtype = torch.float64,
    attention: str = "agentrl_tree",
    **changes: int,
) -> PolicyModel:
    """A random model whose logits differ enough for clipping to happen."""
    torch.manual_seed(7)
    settings = {**SHAPE, **ARCHITECTURES[architecture], **changes}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **settings))
    model.set_attn_implementation(attention)
    make_routers_replay(model)
    return wrap_policy(model.to(dtype))


def make_turn(  # noqa: PLR0913 - what a turn may differ in
    record_id: str,
    index: int,
    added_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    parent: int | None = None,
    shared_len: int = 0,
    logprobs: Sequence[float] | None = None,
    versions: Sequence[tuple[int, int, int]] | None = None,
    temperature: float = 1.0,
    trainable: bool = True,
    advantage: float | None = None,
) -> DispatchedSamplingTask:
    """A turn with only the fields that trees need."""
    spans = versions if versions is not None else [(0, 0, len(output_ids))]
    return DispatchedSamplingTask(
        id=f"{record_id}/1/{index}",
        record_id=record_id,
        task_id=record_id.rsplit("/", 1)[0],
        attempt=1,
        index=index,
        parent=parent,
        shared_len=shared_len,
        added_ids=added_ids,
        output_ids=output_ids,
        output_logprobs=[-1.0] * len(output_ids) if logprobs is None else logprobs,
        version_spans=tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in spans),
        finish_reason="stop",
        trainable=trainable,
        advantage=advantage,
        sampling_params=SamplingParams(temperature=temperature),
    )


def make_record(
    turns: Sequence[DispatchedSamplingTask],
    score: float | None,
    *,
    task_id: str = "train/0/q0",
    traj_id: int = 0,
    outcome: str | None = "answered",
) -> DBRecordData:
    """A finished record around its turns."""
    return DBRecordData(
        record_id=f"{task_id}/{traj_id}",
        task_id=task_id,
        traj_id=traj_id,
        split="train",
        order=0,
        attempt=1,
        outcome=outcome,
        score=None if score is None else Score(scorer="exact", value=score),
        turn_ids=tuple(turn.id for turn in turns),
        num_tokens=0,
        min_version=0,
        max_version=0,
        turns=tuple(turns),
    )


def random_group(
    seed: int, *, num_records: int = 4, num_turns: int = 4, images: Sequence[ShownImage] = ()
) -> SelectedGroup:
    """A group with random advantages, one per turn."""
    return random_groups.random_group(
        np.random.default_rng(seed),
        vocabulary=VOCABULARY,
        num_records=num_records,
        num_turns=num_turns,
        task_id=f"train/0/q{seed}",
        images=images,
    )


def random_routes(seed: int, num_tokens: int, *, layers: int, experts: int) -> np.ndarray:
    """Two experts per token and layer, int16 [N, layers * 2]."""
    chosen = np.random.default_rng(seed).random((num_tokens, layers, experts)).argsort(axis=2)
    return chosen[:, :, :2].reshape(num_tokens, -1).astype(np.int16)


def routed_group(seed: int, *, layers: int = 2, experts: int = 4) -> SelectedGroup:
    """A random group whose records chose experts at random, and thus differently for shared tokens."""
    group = random_group(seed)
    routes: dict[tuple[str, int], np.ndarray] = {}
    turns = {}
    for turn in sorted(group.turns, key=lambda turn: -len(turn.path)):
        chain = (turn.record_id, turn.chain)
        if chain not in routes:
            number = 100 * seed + len(routes)
            routes[chain] = random_routes(number, len(turn.path), layers=layers, experts=experts)
        turns[turn.turn_id] = replace(turn, routed_experts=routes[chain][: len(turn.path)])
    return replace(group, turns=tuple(turns[turn.turn_id] for turn in group.turns))


def gradient(
    policy: PolicyModel,
    batch: StepBatch,
    *,
    kind: str = "GRPO",
    chunk_size: int = 4096,
    autocast: torch.autocast = NO_AUTOCAST,
    **settings: Any,
) -> tuple[float, torch.Tensor]:
    """Loss and flat gradient of a whole step, all ranks summed; settings are of the algorithm."""
    policy.zero_grad(set_to_none=True)
    algorithm = AlgorithmSection(loss_calculator=kind, **settings)
    total = sum(
        forward_backward(
            policy, micro_batch, algorithm, chunk_size=chunk_size, autocast=autocast
        ).loss
        for share in batch.micro_batches
        for micro_batch in share
    )
    return total, flat_gradient(policy)


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    """Return the gradients of the trained parameters, concatenated."""
    found = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Some families have parameters that the forward pass does not use.
            made = parameter.grad
            found.append((torch.zeros_like(parameter) if made is None else made).flatten())
    return torch.cat(found)


def relative_error(gradient_a: torch.Tensor, gradient_b: torch.Tensor) -> float:
    """Norm of the difference over the norm of b."""
    return float((gradient_a - gradient_b).norm() / gradient_b.norm())


def num_chunked(batch: StepBatch) -> int:
    """Return how many rows are computed in chunks."""
    return sum(row.num_chunks > 1 for share in batch.micro_batches for row in share)
