"""No pass of a float64 model computes in less, whatever its modeling file names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from harness.tiny_families import tiny_model
from harness.trees import gradient, random_group
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.data.batch import build_step
from agentrl.models.attention.attention_registry import TREE_ATTENTION
from agentrl.models.load import wrap_policy
from agentrl.models.unrounded import unrounded


class Rounding(TorchDispatchMode):
    """Notes operations that make float32 values of float64 ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        operation: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = operation(*args, **(kwargs or {}))
        read = [one.dtype for one in args if isinstance(one, torch.Tensor)]
        if isinstance(made, torch.Tensor) and made.dtype == torch.float32 and torch.float64 in read:
            self.found.append(str(operation))
        return made


@pytest.mark.filterwarnings("ignore:.*falling back to its reference PyTorch implementation")
@pytest.mark.parametrize("family", ["nemotron_h", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_float64_model_rounds_nowhere(family: str, is_recomputed: bool) -> None:
    model = tiny_model(family)
    model.set_attn_implementation(TREE_ATTENTION)
    policy = wrap_policy(model, gradient_checkpointing=is_recomputed)
    group = random_group(0, num_records=2, num_turns=2)
    with Rounding() as rounding:
        gradient(policy, build_step([group], policy_version=3, token_budget=30), kind="REINFORCE")
    assert rounding.found == []


def test_other_precisions_and_what_comes_after_are_as_they_were() -> None:
    with unrounded(torch.float32):
        assert torch.ones(2, dtype=torch.float64).float().dtype == torch.float32
    with unrounded(torch.float64):
        assert torch.zeros(2).float().dtype == torch.float64
    assert torch.zeros(2).dtype == torch.float32
