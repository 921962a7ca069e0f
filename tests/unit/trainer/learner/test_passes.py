"""The objective of a step is the same however its turns are packed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.trees import NO_AUTOCAST, flat_gradient, random_group, relative_error, tiny_policy

from agentrl.config.sections import AlgorithmSection
from agentrl.data import build_step, normalized_over_step
from agentrl.data.rows import Merge
from agentrl.models.load import wrap_policy
from agentrl.models.policy import PolicyModel
from agentrl.trainer.learner import passes
from agentrl.trainer.learner.passes import forward_backward

torch.set_num_threads(1)
GROUPS = [random_group(seed) for seed in range(2)]
REFERENCE_SEED = 11

DECOUPLED = {"proximal": "loglinear", "importance_weight_cap_ratio": 1e6}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dapo": {"epsilon_higher": 0.08, "dual_clip": 3.0},
    "tis": {**DECOUPLED, "importance_correction": "tis"},
    "icepop": {**DECOUPLED, "importance_correction": "icepop", "correction_upper": 5.0},
    "sequence_mis": {
        **DECOUPLED,
        "importance_correction": "mis",
        "correction_level": "sequence_mean",
        "veto_threshold": 0.05,
    },
    "kl": {"kl_coefficient": 0.1, "kl_estimator": "k2"},
}


def other_policy() -> PolicyModel:
    policy = tiny_policy()
    torch.manual_seed(REFERENCE_SEED)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return wrap_policy(policy.model).requires_grad_(requires_grad=False)


def train_step(
    policy: PolicyModel,
    algorithm: AlgorithmSection,
    merge: Merge,
    token_budget: int,
    num_ranks: int = 1,
    **options: Any,
) -> tuple[float, float, int, torch.Tensor]:
    """Loss, KL, masked target tokens and flat gradient of a whole step."""
    batch = build_step(
        normalized_over_step(GROUPS),
        policy_version=3,
        token_budget=token_budget,
        merge=merge,
        num_ranks=num_ranks,
        reduction="sequence_sum",
        normalizer_length=50,
    )
    policy.zero_grad(set_to_none=True)
    reference = other_policy() if algorithm.kl_coefficient else None
    done = [
        forward_backward(
            policy,
            micro_batch,
            algorithm,
            chunk_size=32,
            autocast=NO_AUTOCAST,
            reference=reference,
            **options,
        )
        for share in batch.micro_batches
        for micro_batch in share
    ]
    gradient = flat_gradient(policy)
    return (
        sum(one.loss for one in done),
        sum(one.kl for one in done),
        sum(int(one.masked.sum()) for one in done),
        gradient,
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_corrections_do_not_depend_on_packing(name: str) -> None:
    algorithm, policy = AlgorithmSection(**ALGORITHMS[name]), tiny_policy()
    loss, kl, masked, expected = train_step(policy, algorithm, "none", 60)
    assert (kl > 0) is (name == "kl")
    assert (masked > 0) is (name in ("icepop", "sequence_mis"))
    packings: tuple[tuple[Merge, int, int], ...] = (
        ("tree", 10**6, 1),
        ("tree", 12, 2),
        ("linear", 40, 3),
    )
    for merge, token_budget, num_ranks in packings:
        found = train_step(policy, algorithm, merge, token_budget, num_ranks)
        assert found[0] == pytest.approx(loss, rel=1e-10)
        assert found[1] == pytest.approx(kl, rel=1e-10)
        assert found[2] == masked
        assert relative_error(found[3], expected) <= 1e-10


@pytest.mark.parametrize("name", ["cispo", "icepop"])
def test_float32_gradients_of_trees_are_as_near_to_the_truth_as_those_of_single_turns(
    name: str,
) -> None:
    algorithm = AlgorithmSection(**(ALGORITHMS | {"cispo": {"loss_calculator": "CISPO"}})[name])
    exact, rounded = tiny_policy(), tiny_policy(dtype=torch.float32)
    exact.load_state_dict(rounded.state_dict())
    truth = train_step(exact, algorithm, "none", 10**6)[3]

    def error(merge: Merge, token_budget: int) -> float:
        found = train_step(rounded, algorithm, merge, token_budget)[3]
        return relative_error(found.double(), truth)

    single = error("none", 10**6)
    for token_budget in (10**6, 12):
        assert error("tree", token_budget) <= 2 * single
    assert single <= 1e-5


def test_the_reference_gets_no_gradient_and_pulls_the_policy() -> None:
    policy = tiny_policy()
    plain = train_step(policy, AlgorithmSection(), "tree", 10**6)[3]
    pulled = train_step(policy, AlgorithmSection(kl_coefficient=0.1), "tree", 10**6)[3]
    assert relative_error(pulled, plain) > 1e-3


@pytest.mark.parametrize(
    "flags",
    [
        {"epsilon": 0.01},
        {"loss_calculator": "CISPO", "epsilon_higher": 0.5},
        {"beta1": 0.5},
        {"beta2": 0.5},
        # Where GRPO drops a token it has clipped it before: these bounds are for losses without clip.
        {"loss_calculator": "MINIRL", "importance_weight_cap_ratio": 1.0},
        {"loss_calculator": "MINIRL", "strict_in_bound": True},
        {"loss_calculator": "MINIRL", "out_of_date_decay": 2.0},
        {"dual_clip": 1.05},
        {"loss_calculator": "MINIRL"},
        {"loss_calculator": "MINIRL", "importance_weight_truncation": 0.5},
        {"loss_calculator": "GSPO"},
        {"loss_calculator": "CISPO"},
        {"loss_calculator": "REINFORCE"},
        {"proximal": "recompute"},
        {"proximal": "loglinear"},
        {"proximal": "recompute", "importance_correction": "full"},
        {"proximal": "recompute", "importance_correction": "tis", "correction_upper": 0.9},
        {"proximal": "recompute", "importance_correction": "mis", "correction_lower": 0.9},
        {"proximal": "recompute", "veto_threshold": 0.5},
        {
            "proximal": "recompute",
            "importance_correction": "full",
            "correction_level": "sequence_mean",
        },
        {"kl_coefficient": 0.1},
        {"kl_coefficient": 0.1, "kl_estimator": "k1"},
    ],
    ids=lambda flags: "+".join(f"{name}={value}" for name, value in flags.items()),
)
def test_every_flag_of_the_loss_reaches_the_gradient(flags: dict[str, Any]) -> None:
    policy = tiny_policy()
    *others, _ = flags  # the last one makes the difference
    gradients = [
        train_step(policy, AlgorithmSection(**chosen), "tree", 10_000)[3]
        for chosen in (flags, {name: flags[name] for name in others})
    ]
    assert relative_error(*gradients) > 1e-3


def test_a_users_loss_sees_the_turn_and_the_record_of_every_token(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def own(inputs):\n"
        "    return -inputs.policy_logprobs, {'turn': inputs.turns, 'record': inputs.records}\n"
    )
    ((batch,),) = build_step(GROUPS, policy_version=3, token_budget=10_000).micro_batches
    algorithm = AlgorithmSection(loss_calculator=f"{file}:own")
    found = forward_backward(
        tiny_policy(), batch, algorithm, chunk_size=32, autocast=NO_AUTOCAST
    ).metrics
    assert found["record"].tolist() == batch.records.tolist()
    numbers = set(zip(found["turn"].tolist(), batch.turns.tolist(), strict=True))
    assert len(numbers) == len(np.unique(batch.turns)) > len(np.unique(batch.records))


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("token_budget", [10**6, 12])
def test_activations_in_host_memory_change_no_bit_of_a_gradient(
    monkeypatch: pytest.MonkeyPatch, token_budget: int, recomputes: bool
) -> None:
    saved: list[torch.Tensor] = []
    to_host = passes._to_host

    def noted(tensor: torch.Tensor) -> Any:
        saved.append(tensor)
        return to_host(tensor)

    monkeypatch.setattr(passes, "_to_host", noted)
    algorithm = AlgorithmSection(kl_coefficient=0.1)
    policy = wrap_policy(tiny_policy().model, gradient_checkpointing=recomputes)
    plain = train_step(policy, algorithm, "tree", token_budget)
    assert not saved
    offloaded = train_step(policy, algorithm, "tree", token_budget, activation_offloading=True)
    assert saved
    assert plain[:3] == offloaded[:3]
    assert torch.equal(plain[3], offloaded[3])
