from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.models.checkpoints.architectures import num_positions


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 4096),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, 4096),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, None),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_only_a_factor_scales_positions(fields: dict[str, Any], expected: int | None) -> None:
    decoder = SimpleNamespace(**{"max_position_embeddings": 4096, **fields})
    assert num_positions(decoder) == expected
