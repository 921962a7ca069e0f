# ruff: noqa: N806  (tensor names end in their shape)
"""The demo model and its warm start: a short imitation of noisy demonstrations.

What comes out knows the protocol (tool calls, copying names and numbers, answering with the last
result) and guesses at the choices (which look-up, which operation), which is what GRPO then
teaches it.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from examples.shop.episodes import Codec, Habits, demonstrate, forward_shared_prefix
from examples.shop.questions import Question
from examples.shop.tokenizer import END_OF_TEXT


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Settings of the imitation."""

    num_steps: int = 550
    num_bare_steps: int = 300
    """First steps, in which the prompt's list of tools is left out: a model that need not search
    a long prompt finds out much sooner that names and numbers are to be copied."""
    num_episodes: int = 24
    """Demonstrations a step."""
    learning_rate: float = 1.5e-3
    """Held after the warm-up until the list of tools comes in, then lowered to 0 (cosine)."""
    num_warmup_steps: int = 40
    habits: Habits = field(default_factory=Habits)


def new_model(codec: Codec, seed: int) -> Qwen3ForCausalLM:
    """Return a randomly initialised model of some 0.7M parameters in the Qwen3 architecture."""
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
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=codec.turn_end,
        pad_token_id=codec.tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = codec.turn_end
    model.generation_config.do_sample = True
    return model


def imitate(
    model: PreTrainedModel,
    codec: Codec,
    questions: list[Question],
    settings: WarmStart,
    *,
    seed: int,
    report: Callable[[int, float], None],
) -> None:
    """Train the model on demonstrations, the loss on the assistant's tokens alone.

    `report` gets the step and its loss in nats a token.
    """
    draw = random.Random(f"demonstrations {seed}")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    num_tool_tokens = codec.prefix.index(codec.turn_end) + 1
    model.train()
    for step in range(settings.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(settings, step)
        is_bare = step < settings.num_bare_steps
        episodes = [
            demonstrate(codec, draw.choice(questions), draw, settings.habits)
            for _ in range(settings.num_episodes)
        ]
        logp_BT, sampled_BT = forward_shared_prefix(
            model, codec, episodes, num_left_out=num_tool_tokens if is_bare else 0
        )
        loss = -(logp_BT * sampled_BT).sum() / sampled_BT.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report(step, loss.item())
    model.eval()


def _learning_rate(settings: WarmStart, step: int) -> float:
    warmup = min(1.0, (step + 1) / settings.num_warmup_steps)
    num_decaying = settings.num_steps - settings.num_bare_steps
    progress = max(0.0, (step - settings.num_bare_steps) / num_decaying)
    return settings.learning_rate * warmup * 0.5 * (1 + math.cos(math.pi * progress))
