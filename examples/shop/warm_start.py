"""The demo models of the shop and their warm start: a short imitation of noisy demonstrations.

The resulting model follows the protocol (tool calls, copying names and numbers, answering with the
last result) and guesses the choices (which look-up, which operation), which GRPO then teaches it.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.models.attention.attention_registry import TREE_ATTENTION
from agentrl.models.load import wrap_policy
from agentrl.plugins.sft.curriculum import Example, sft_batch
from agentrl.trainer.learner.passes import forward_backward
from examples.shop.episodes import Codec, Episode, episode_turns

_ONE_ROW = 1 << 20
"""A budget above the tokens of any step."""
_CROSS_ENTROPY = None
"""Without settings of a policy loss, `forward_backward` computes the cross-entropy."""
_NO_AUTOCAST = torch.autocast("cpu", enabled=False)


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Settings of the imitation."""

    num_steps: int = 550
    num_bare_steps: int = 300
    """First steps, in which the prompt omits the list of tools: with a short prompt, the model learns
    much sooner to copy names and numbers."""
    num_episodes: int = 24
    """Demonstrations per step."""
    learning_rate: float = 1.5e-3
    """Constant after the warm-up until the list of tools is added, then lowered to 0 (cosine)."""
    num_warmup_steps: int = 40


HYBRID = WarmStart(num_steps=420, num_bare_steps=220)
"""Convolutions see the preceding tokens, so the model learns to copy sooner."""
ERRANDS = WarmStart(num_steps=800, num_bare_steps=500)
"""Of the longer demo, from the demo's model."""


def new_model(codec: Codec, seed: int) -> Qwen3ForCausalLM:
    """Return a randomly initialized model of some 0.7M parameters in the Qwen3 architecture."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(codec.tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=codec.turn_end,
        pad_token_id=codec.pad,
    )
    model = Qwen3ForCausalLM(config)
    _end_turns(model, codec)
    return model


def new_hybrid(codec: Codec, seed: int) -> Lfm2ForCausalLM:
    """Return a randomly initialized model in the LFM2 architecture: convolutions and attention."""
    torch.manual_seed(seed)
    config = Lfm2Config(
        vocab_size=len(codec.tokenizer),
        hidden_size=128,
        intermediate_size=256,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        conv_L_cache=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=codec.turn_end,
        pad_token_id=codec.pad,
    )
    model = Lfm2ForCausalLM(config)
    _end_turns(model, codec)
    return model


def _end_turns(model: PreTrainedModel, codec: Codec) -> None:
    model.generation_config.eos_token_id = codec.turn_end
    model.generation_config.do_sample = True


def imitate(
    model: PreTrainedModel,
    codec: Codec,
    demonstration: Callable[[random.Random], Episode],
    settings: WarmStart,
    *,
    seed: int,
    report: Callable[[int, float], None],
) -> None:
    """Train the model on demonstrations, with loss only on the assistant's tokens.

    Args:
        model: is changed in place.
        codec: of the model.
        demonstration: draws one.
        settings: of the imitation.
        seed: of the draws.
        report: receives the step and its loss in nats per token.
    """
    draw = random.Random(f"demonstrations {seed}")
    model.set_attn_implementation(TREE_ATTENTION)
    policy = wrap_policy(model)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    num_tool_tokens = codec.prefix.index(codec.turn_end) + 1
    for step in range(settings.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(settings, step)
        num_left_out = num_tool_tokens if step < settings.num_bare_steps else 0
        examples = [
            Example(
                name,
                tuple(episode_turns(demonstration(draw), name, num_left_out=num_left_out)),
            )
            for name in map(str, range(settings.num_episodes))
        ]
        batch = sft_batch(examples, token_budget=_ONE_ROW, num_ranks=1)
        loss = sum(
            forward_backward(
                policy, row, _CROSS_ENTROPY, chunk_size=_ONE_ROW, autocast=_NO_AUTOCAST
            ).loss
            for row in batch.micro_batches[0]
        )
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report(step, loss)
    model.set_attn_implementation("sdpa")
    model.eval()


def _learning_rate(settings: WarmStart, step: int) -> float:
    warmup = min(1.0, (step + 1) / settings.num_warmup_steps)
    num_decaying = settings.num_steps - settings.num_bare_steps
    progress = max(0.0, (step - settings.num_bare_steps) / num_decaying)
    return settings.learning_rate * warmup * 0.5 * (1 + math.cos(math.pi * progress))
