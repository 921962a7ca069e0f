"""Bytes on a server, for the kinds of layers that models have."""

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.plugins.planner.memory_plan import served_model

KIB = 1024
QWEN3_4B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2560,
}


@pytest.mark.parametrize(
    ("values", "tp_size", "per_token", "per_window"),
    [
        (QWEN3_4B, 1, 144 * KIB, 0),
        (QWEN3_4B, 4, 36 * KIB, 0),
        # More GPUs than heads: each keeps one.
        (QWEN3_4B, 16, 18 * KIB, 0),
        ({"text_config": QWEN3_4B}, 1, 144 * KIB, 0),
        # Without `head_dim` and fewer heads for keys.
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}, 1, 512, 0),
        # Half of the layers have a window of 1,024 tokens.
        (
            QWEN3_4B
            | {"layer_types": ["sliding_attention", "full_attention"] * 18, "sliding_window": 1024},
            1,
            72 * KIB,
            72 * KIB * 1024,
        ),
        # Three layers of four keep a state, and no keys.
        (
            QWEN3_4B | {"layer_types": [*["linear_attention"] * 3, "full_attention"] * 9},
            1,
            36 * KIB,
            0,
        ),
        # DeepSeek-V3: 61 layers of 512 + 64 numbers.
        (
            {
                "num_hidden_layers": 61,
                "num_attention_heads": 128,
                "hidden_size": 7168,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
            },
            8,
            61 * 576 * 2,
            0,
        ),
    ],
)
def test_cache_of_a_token(
    values: dict[str, Any], tp_size: int, per_token: int, per_window: int
) -> None:
    found = served_model(SimpleNamespace(**values), 4 * 10**9, tp_size=tp_size)
    assert (found.cache_per_token, found.cache_per_window) == (per_token, per_window)
    assert found.weights == 8 * 10**9 // tp_size
    assert found.cache(10) == 10 * per_token + per_window
