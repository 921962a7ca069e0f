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

    num_steps: int = 800
    num_episodes: int = 32
    """Demonstrations a step."""
    learning_rate: float = 3e-3
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
    # episodes of one step take equally many turns, so that little is spent on padding
    by_length: dict[int, list[Question]] = {}
    for question in questions:
        by_length.setdefault(len(question.kind.lookups), []).append(question)
    pools = list(by_length.values())
    model.train()
    for step in range(settings.num_steps):
        progress = step / settings.num_steps
        warmup = min(1.0, (step + 1) / settings.num_warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * warmup * 0.5 * (1 + math.cos(math.pi * progress))
        pool = draw.choice(pools)
        episodes = [
            demonstrate(codec, draw.choice(pool), draw, settings.habits)
            for _ in range(settings.num_episodes)
        ]
        logp_BT, sampled_BT = forward_shared_prefix(model, codec, episodes)
        loss = -(logp_BT * sampled_BT).sum() / sampled_BT.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report(step, loss.item())
    model.eval()
