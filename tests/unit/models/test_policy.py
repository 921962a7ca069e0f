from dataclasses import replace

import numpy as np
import torch
from harness.trees import flat_gradient, random_group, tiny_policy
from support.dense_attention import DENSE_ATTENTION

from agentrl.data.rows import TokenTree, empty_row
from agentrl.models.policy import target_logprobs

torch.set_num_threads(1)


def test_logprobs_are_those_of_the_dense_oracle() -> None:
    row = TokenTree.from_tokens(random_group(2).turns).row
    found = target_logprobs(tiny_policy(), row, with_entropy=True)
    oracle = target_logprobs(tiny_policy(attention=DENSE_ATTENTION), row, with_entropy=True)
    assert torch.allclose(found.logprobs, oracle.logprobs, rtol=0, atol=1e-12)
    assert found.entropies is not None
    assert oracle.entropies is not None
    assert torch.allclose(found.entropies, oracle.entropies, rtol=0, atol=1e-12)


def test_entropy_and_temperature_match_the_full_distribution() -> None:
    row = TokenTree.from_tokens(random_group(3, num_records=1, num_turns=1).turns).row
    policy = tiny_policy()
    found = target_logprobs(policy, row, with_entropy=True)
    ids = torch.from_numpy(row.token_ids)[None]
    policy.model.set_attn_implementation("sdpa")
    logits = policy.model(input_ids=ids, use_cache=False).logits[0, row.sources]
    scaled = logits / torch.from_numpy(row.temperatures).double()[:, None]
    distribution = torch.distributions.Categorical(logits=scaled)
    assert found.entropies is not None
    assert torch.allclose(found.entropies, distribution.entropy(), atol=1e-12)
    assert torch.allclose(found.logprobs, distribution.log_prob(torch.from_numpy(row.targets)))
    assert not found.entropies.requires_grad


def test_a_sibling_branch_cannot_be_seen() -> None:
    tree = TokenTree.from_tokens(random_group(4).turns)
    policy, row = tiny_policy(), tree.row
    before = target_logprobs(policy, row).logprobs
    branching = int(np.flatnonzero(row.positions[1:] <= row.positions[:-1])[0]) + 1
    token_ids = row.token_ids.copy()
    token_ids[branching:] = (token_ids[branching:] + 1) % 40
    after = target_logprobs(policy, replace(row, token_ids=token_ids)).logprobs
    untouched = row.sources < branching
    assert torch.equal(before[untouched], after[untouched])
    assert not torch.allclose(before[~untouched], after[~untouched])


def test_empty_row_gives_every_parameter_a_zero_gradient() -> None:
    policy = tiny_policy()
    logprobs = target_logprobs(policy, empty_row()).logprobs
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert not flat_gradient(policy).any()


def test_logprobs_of_a_bfloat16_model_are_float32() -> None:
    row = TokenTree.from_tokens(random_group(2).turns).row
    assert target_logprobs(tiny_policy(dtype=torch.bfloat16), row).logprobs.dtype == torch.float32
