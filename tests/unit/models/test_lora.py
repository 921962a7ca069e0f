"""Adapters: exact on token trees, PEFT's own on disk, and nothing without them."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.trees import (
    NO_AUTOCAST,
    flat_gradient,
    gradient,
    random_group,
    relative_error,
    tiny_policy,
)
from peft import PeftModel
from support.separate import sampled_by, separate_gradient
from support.training import write_model, write_moe_model
from transformers import AutoModelForCausalLM

from agentrl.config.sections import AlgorithmSection, ModelSection
from agentrl.data.batch import StepBatch, build_step
from agentrl.data.rows import Merge
from agentrl.errors import ConfigError
from agentrl.models.checkpoints.adapter_files import AdapterShape
from agentrl.models.checkpoints.resolve import check_adapter_targets
from agentrl.models.load import load_policy
from agentrl.models.lora import (
    BasePolicy,
    adapter_tensors,
    add_adapter,
    load_adapter,
    merge_adapter,
    save_adapter,
    start_adapter,
)
from agentrl.models.policy import PolicyModel
from agentrl.trainer.learner.passes import forward_backward, frozen_pass

torch.set_num_threads(1)
GROUPS = sampled_by(tiny_policy(), [random_group(seed) for seed in range(2)])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def shape(*targets: str) -> AdapterShape:
    wanted = targets or ModelSection().lora_target_modules
    return AdapterShape(rank=4, alpha=8, target_modules=wanted, base="somewhere/base")


def adapted(policy: PolicyModel, *targets: str, seed: int = 5) -> PolicyModel:
    """A policy with an adapter that changes what it says."""
    add_adapter(policy.model, shape(*targets), dtype=policy.model.dtype)
    start_adapter(policy, seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    return policy


def with_room(model_path: Path, wanted: AdapterShape) -> PolicyModel:
    """A policy with an adapter that has no values yet."""
    return load_policy(
        model_path, prepare=lambda p: add_adapter(p.model, wanted, dtype=torch.float32)
    )


def batches(merge: Merge = "tree", token_budget: int = 10**6) -> StepBatch:
    return build_step(GROUPS, policy_version=3, token_budget=token_budget, merge=merge)


def logprobs(policy: PolicyModel | BasePolicy) -> np.ndarray:
    (batch,) = batches().micro_batches[0]
    return frozen_pass(policy, batch, chunk_size=64, autocast=NO_AUTOCAST).logprobs.numpy()


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        *product(("qwen3", "llama"), ((), ("q_proj",), ("down_proj", "v_proj"))),
        ("qwen3_moe", ("q_proj", "o_proj")),
    ],
)
def test_gradients_of_merged_turns_equal_those_of_separate_turns(
    architecture: str, targets: tuple[str, ...]
) -> None:
    policy = adapted(tiny_policy(architecture), *targets)
    loss, expected = separate_gradient(policy, GROUPS)
    packings: list[tuple[Merge, int]] = [
        ("tree", 10**6),
        ("linear", 10**6),
        ("none", 10**6),
        ("tree", 30),
        ("tree", 12),
    ]
    for merge, token_budget in packings:
        merged_loss, merged = gradient(policy, batches(merge, token_budget))
        assert relative_error(merged, expected) <= 1e-12
        assert merged_loss == pytest.approx(loss, rel=1e-11)


def test_only_the_adapter_gets_gradients() -> None:
    policy = adapted(tiny_policy())
    gradient(policy, batches())
    trained = {name for name, p in policy.named_parameters() if p.grad is not None}
    assert trained
    assert all(".lora_" in name for name in trained)
    assert len(trained) == 2 * 2 * 7, "A and B of seven linear layers in two blocks"


def test_a_new_adapter_changes_nothing_and_depends_on_the_seed_alone() -> None:
    base = logprobs(tiny_policy())
    found = []
    for seed in (1, 1, 2):
        policy = tiny_policy()
        add_adapter(policy.model, shape(), dtype=torch.float64)
        start_adapter(policy, seed)
        np.testing.assert_array_equal(logprobs(policy), base)
        found.append(torch.cat([t.flatten() for t in adapter_tensors(policy).values()]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_the_reference_is_the_base_model_without_a_second_one() -> None:
    policy = adapted(tiny_policy())
    changed = logprobs(policy)
    np.testing.assert_array_equal(logprobs(BasePolicy(policy)), logprobs(tiny_policy()))
    np.testing.assert_array_equal(logprobs(policy), changed)


def test_a_penalty_against_the_base_equals_one_against_a_copy_of_it() -> None:
    algorithm = AlgorithmSection(kl_coefficient=0.5)
    copy = tiny_policy().requires_grad_(requires_grad=False)
    found = []
    policy = adapted(tiny_policy())
    for reference in (BasePolicy(policy), copy):
        policy.zero_grad(set_to_none=True)
        done = forward_backward(
            policy,
            batches().micro_batches[0][0],
            algorithm,
            chunk_size=64,
            autocast=NO_AUTOCAST,
            reference=reference,
        )
        found.append((done.kl, flat_gradient(policy)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert found[0][0] > 0.0
    assert relative_error(found[0][1], found[1][1]) <= 1e-12


def test_peft_loads_what_is_written_and_says_the_same(model_path: Path, tmp_path: Path) -> None:
    policy = adapted(load_policy(model_path, attention=None))
    path = save_adapter(policy, tmp_path / "adapter", adapter_tensors(policy), dtype=torch.float32)
    assert {file.name for file in path.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    ids = torch.arange(20)[None]
    base = AutoModelForCausalLM.from_pretrained(model_path)
    with torch.no_grad():
        plain = base(ids).logits.clone()
        own = policy.model(ids)
        found = PeftModel.from_pretrained(base, path)(ids).logits
        whole = merge_adapter(path, model_path, tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(whole)(ids).logits
    torch.testing.assert_close(found, own.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(merged, found, rtol=0, atol=1e-5)
    assert (found - plain).abs().max() > 0.01
    assert (whole / "tokenizer.json").read_bytes() == (model_path / "tokenizer.json").read_bytes()


def test_a_written_adapter_is_read_again_bit_for_bit(model_path: Path, tmp_path: Path) -> None:
    policy = adapted(load_policy(model_path))
    path = save_adapter(policy, tmp_path / "adapter", adapter_tensors(policy), dtype=torch.float32)
    other = with_room(model_path, shape())
    load_adapter(other, path)
    for name, tensor in adapter_tensors(policy).items():
        assert torch.equal(adapter_tensors(other)[name], tensor)


def test_an_adapter_of_another_shape_is_refused(model_path: Path, tmp_path: Path) -> None:
    policy = adapted(load_policy(model_path))
    path = save_adapter(policy, tmp_path / "adapter", adapter_tensors(policy), dtype=torch.float32)
    narrow = replace(shape(), rank=2)
    with pytest.raises(ConfigError, match="--lora_rank"):
        load_adapter(with_room(model_path, narrow), path)
    with pytest.raises(ConfigError, match="--lora_target_modules"):
        load_adapter(with_room(model_path, shape("q_proj")), path)


def test_a_target_that_the_model_lacks_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(ConfigError, match=r"qkv_proj: .*down_proj.*q_proj"):
        add_adapter(tiny_policy().model, shape("qkv_proj"), dtype=torch.float64)
    with pytest.raises(ConfigError, match="lm_head"):
        add_adapter(tiny_policy("llama").model, shape("lm_head"), dtype=torch.float64)


def test_experts_get_no_adapter(model_path: Path, tmp_path: Path) -> None:
    mixture = write_moe_model(tmp_path)
    every = ModelSection().lora_target_modules
    check_adapter_targets(model_path, every)
    check_adapter_targets(mixture, every[:4])
    with pytest.raises(
        ConfigError,
        match=r"gate_proj,up_proj,down_proj: .* is a mixture of experts, .* choose from q_proj,",
    ):
        check_adapter_targets(mixture, every)
