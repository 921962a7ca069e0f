"""Everything about variable-length attention but its kernel, which is for CUDA.

In the kernel's place stands what its documentation says that it computes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.trees import flat_gradient, random_group, relative_error, tiny_policy
from support.dense_attention import DENSE_ATTENTION
from torch.nn.functional import scaled_dot_product_attention

from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.data.rows import TokenTree
from agentrl.distributed import Ranks
from agentrl.errors import ConfigError
from agentrl.models.load import load_policy
from agentrl.models.policy import ChunkedPass, PolicyModel, target_logprobs
from agentrl.trainer.learner.learner import Learner
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights

torch.set_num_threads(1)
ROW = TokenTree.from_tokens(random_group(5).turns).row


def as_documented(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_edges: torch.Tensor,
    key_edges: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """Causal attention of each sequence, aligned with its last key."""
    assert window_size == (-1, 0)
    outputs = []
    for (q0, q1), (k0, k1) in zip(
        query_edges.unfold(0, 2, 1).tolist(), key_edges.unfold(0, 2, 1).tolist(), strict=True
    ):
        assert q1 - q0 <= max_q
        assert k1 - k0 <= max_k
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        q, k, v = (s.transpose(0, 1)[None] for s in (query[q0:q1], key[k0:k1], value[k0:k1]))
        output = scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def as_before_2_13(*arguments: Any, scale: float, window_size: tuple[int, int]) -> torch.Tensor:
    """What PyTorch 2.11 has: the same, where every query head has its own keys."""
    query, key, value, *_ = arguments
    assert query.shape[1] == key.shape[1] == value.shape[1]
    return as_documented(*arguments, scale=scale, window_size=window_size, enable_gqa=False)


def gradient(policy: PolicyModel, num_chunks: int = 1) -> torch.Tensor:
    if num_chunks == 1:
        target_logprobs(policy, ROW).logprobs.square().sum().backward()
    else:
        passes = ChunkedPass(policy, ROW, num_chunks=num_chunks)
        passes.backward(2 * passes.forward().logprobs)
    return flat_gradient(policy)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("kernel", [as_documented, as_before_2_13])
def test_gradients_are_those_of_the_oracle(
    architecture: str,
    num_chunks: int,
    kernel: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentrl.models.attention.varlen.varlen_attn", kernel)
    expected = gradient(tiny_policy(architecture, attention=DENSE_ATTENTION))
    found = gradient(tiny_policy(architecture, attention="agentrl_varlen"), num_chunks)
    assert relative_error(found, expected) <= 1e-12


def test_training_on_cpu_is_refused(tmp_path: Path) -> None:
    tiny_policy().model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="varlen trains on CUDA only"):
        load_policy(tmp_path, attention="agentrl_varlen")


def test_other_precisions_than_bfloat16_are_refused(tmp_path: Path) -> None:
    model = ModelSection(attention_implementation="varlen", torch_dtype="float32")
    with pytest.raises(ConfigError, match="varlen computes in bfloat16; give --torch_dtype bfl"):
        Learner(
            LearnerSettings(
                weights=StartWeights(tmp_path),
                model=model,
                trainer=TrainerSection(),
                algorithm=AlgorithmSection(),
                seed=0,
            ),
            Ranks(),
        )
