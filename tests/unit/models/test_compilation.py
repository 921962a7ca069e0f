"""A compiled policy computes what it does without compilation, for whole rows and in chunks."""

from functools import partial

import pytest
import torch
import torch._dynamo.config
from harness.tiny_families import FAMILIES, tiny_model
from harness.trees import gradient, num_chunked, random_group, relative_error
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention

from agentrl.data.batch import build_step
from agentrl.errors import ConfigError
from agentrl.models.attention.attention_registry import TREE_ATTENTION
from agentrl.models.attention.flex import FLEX
from agentrl.models.compilation import compile_policy
from agentrl.models.load import wrap_policy
from agentrl.models.policy import PolicyModel

torch.set_num_threads(1)
GROUPS = [random_group(seed, num_records=3, num_turns=3) for seed in range(2)]
WHOLE, IN_CHUNKS = 10**6, 12
CPU = torch.device("cpu")


def policy_of(
    family: str, attention: str = TREE_ATTENTION, *, recomputed: bool = True
) -> PolicyModel:
    torch.manual_seed(0)
    model = tiny_model(family, torch.float32)
    model.set_attn_implementation(attention)
    return wrap_policy(model, gradient_checkpointing=recomputed)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # compilers warn, differently in each version of torch
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_without_compilation(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    torch.compiler.reset()
    counters.clear()
    plain, compiled = policy_of(family), policy_of(family)
    compile_policy(compiled, CPU)
    for token_budget in (WHOLE, IN_CHUNKS):
        step = build_step(GROUPS, policy_version=3, token_budget=token_budget)
        assert (num_chunked(step) > 0) == (token_budget == IN_CHUNKS)
        loss, expected = gradient(plain, step, kind="REINFORCE")
        found_loss, found = gradient(compiled, step, kind="REINFORCE")
        assert found_loss == pytest.approx(loss, rel=1e-4)
        assert relative_error(found, expected) <= 1e-4
    assert counters["stats"]["unique_graphs"] > 2, "both sides of attention, and head"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("family", "recomputed"),
    [
        ("qwen3", False),
        pytest.param("olmo3", True, marks=pytest.mark.slow),
        pytest.param("gemma2", False, marks=pytest.mark.slow),
        pytest.param("gpt_oss", True, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_layer_contains_its_attention(
    family: str, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With operations in place of kernels, which FlexAttention lacks on CPU."""
    traced = partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", traced)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    torch.compiler.reset()
    plain, compiled = (
        policy_of(family, attention, recomputed=recomputed)
        for attention in (TREE_ATTENTION, FLEX.implementation)
    )
    compile_policy(compiled, CPU)
    for groups in (GROUPS[:1], GROUPS):
        step = build_step(groups, policy_version=3, token_budget=WHOLE)
        loss, expected = gradient(plain, step, kind="REINFORCE")
        found_loss, found = gradient(compiled, step, kind="REINFORCE")
        assert found_loss == pytest.approx(loss, rel=1e-4)
        assert relative_error(found, expected) <= 1e-4


@pytest.mark.parametrize(
    ("device", "variable", "named", "missing"),
    [
        ("cpu", "CXX", "no-such-compiler", "no-such-compiler"),
        ("cuda", "CC", "no-such-compiler", "no-such-compiler"),
        ("cpu", "CXX", None, r"g\+\+"),
        ("cuda", "CC", None, "gcc or clang"),
    ],
)
def test_a_machine_without_a_compiler_says_so(
    device: str, variable: str, named: str | None, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if named is None:
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setenv(variable, named)
    with pytest.raises(ConfigError, match=f"there is no {missing}; install it, set {variable}"):
        compile_policy(policy_of("qwen3"), torch.device(device))
