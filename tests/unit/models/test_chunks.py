"""Rows in chunks give the gradients of whole rows."""

from typing import Any

import numpy as np
import pytest
import torch
from harness.trees import flat_gradient, random_group, relative_error, tiny_policy

from agentrl.data.rows import PackedRow, TokenTree
from agentrl.models.attention.sdpa import SDPABackend
from agentrl.models.load import wrap_policy
from agentrl.models.policy import ChunkedPass, PolicyModel, target_logprobs
from agentrl.models.rows.chunk_states import RowStates, TokenValues
from agentrl.models.rows.row_chunks import cut_row

torch.set_num_threads(1)
ROW = TokenTree.from_tokens(random_group(5).turns).row
COEFFICIENTS = torch.from_numpy(np.random.default_rng(0).normal(size=ROW.num_targets))


def taken_gradient(policy: PolicyModel) -> torch.Tensor:
    found = flat_gradient(policy)
    policy.zero_grad(set_to_none=True)
    return found


def whole(policy: PolicyModel, row: PackedRow = ROW) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = target_logprobs(policy, row).logprobs
    (COEFFICIENTS.to(logprobs.dtype) * logprobs).sum().backward()
    return logprobs.detach(), taken_gradient(policy)


def chunked(policy: PolicyModel, num_chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
    passes = ChunkedPass(policy, ROW, num_chunks=num_chunks)
    logprobs = passes.forward().logprobs
    passes.backward(COEFFICIENTS.to(logprobs.dtype))
    return logprobs, taken_gradient(policy)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("num_chunks", [1, 2, 5, 23])
def test_chunked_gradients_equal_those_of_the_whole_row(
    architecture: str, dtype: torch.dtype, bound: float, num_chunks: int
) -> None:
    policy = tiny_policy(architecture, dtype)
    expected_logprobs, expected = whole(policy)
    logprobs, found = chunked(policy, num_chunks)
    assert relative_error(logprobs, expected_logprobs) <= bound
    assert relative_error(found, expected) <= bound


def test_chunks_go_with_gradient_checkpointing() -> None:
    policy = tiny_policy()
    _, expected = whole(policy)
    assert (
        relative_error(
            chunked(wrap_policy(policy.model, gradient_checkpointing=True), 4)[1], expected
        )
        <= 1e-12
    )


def test_more_chunks_than_tokens_are_passes_over_nothing() -> None:
    chunks = cut_row(ROW, ROW.num_tokens + 2)
    assert chunks[-2:] == [None, None]
    policy = tiny_policy()
    _, expected = whole(policy)
    assert relative_error(chunked(policy, ROW.num_tokens + 2)[1], expected) <= 1e-12


def test_chunks_cover_every_token_and_term_once() -> None:
    chunks = [chunk for chunk in cut_row(ROW, 7) if chunk is not None]
    assert len(chunks) == 7
    assert max(chunk.row.num_tokens for chunk in chunks) <= -(-ROW.num_tokens // 7)
    assert np.concatenate([chunk.row.token_ids for chunk in chunks]).tolist() == (
        ROW.token_ids.tolist()
    )
    assert sorted(np.concatenate([chunk.targets for chunk in chunks]).tolist()) == list(
        range(ROW.num_targets)
    )


def test_entropies_come_in_the_order_of_the_terms() -> None:
    policy = tiny_policy()
    expected = target_logprobs(policy, ROW, with_entropy=True).entropies
    found = ChunkedPass(policy, ROW, num_chunks=6).forward(with_entropy=True).entropies
    assert found is not None
    assert expected is not None
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_without_the_gradients_of_keys_and_values_the_difference_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = tiny_policy()
    _, expected = whole(policy)
    values_above = RowStates.values_above

    def detached(self: RowStates, *place: Any) -> TokenValues:
        return tuple(values.detach() for values in values_above(self, *place))

    monkeypatch.setattr(RowStates, "values_above", detached)
    _, found = chunked(policy, 4)
    assert relative_error(found, expected) > 1e-3


def test_the_tokens_above_a_chunk_are_its_stretches() -> None:
    chunks = [chunk for chunk in cut_row(ROW, 11) if chunk is not None]
    with_branches = [chunk for chunk in chunks if len(chunk.above)]
    assert any(len(chunk.stretches_above) > 1 for chunk in with_branches)
    for chunk in with_branches:
        indices = [np.arange(part.start, part.stop) for part in chunk.stretches_above]
        assert np.concatenate(indices).tolist() == chunk.above.tolist()


def test_no_pass_meets_more_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    layout = SDPABackend.layout

    def noted(self: SDPABackend, row: PackedRow, *arguments: Any) -> Any:
        lengths.append(row.num_tokens)
        return layout(self, row, *arguments)

    monkeypatch.setattr(SDPABackend, "layout", noted)
    chunked(tiny_policy(), 8)
    assert len(lengths) == 16
    assert max(lengths) <= -(-ROW.num_tokens // 8)
