"""Command lines of inference servers."""

from pathlib import Path

import pytest

from agentrl.config.sections import InferenceSection, ModelSection
from agentrl.server import commands


@pytest.mark.parametrize("router_replay", [False, True])
def test_sglang_says_which_experts_it_chose_where_they_are_replayed(
    monkeypatch: pytest.MonkeyPatch, router_replay: bool
) -> None:
    monkeypatch.setattr(commands, "sglang_python", lambda: "python")
    argv = commands.server_command(
        InferenceSection(inference_backend="sglang"),
        ModelSection(router_replay=router_replay),
        model_path=Path("model"),
        port=30000,
        version=0,
        seed=0,
    )
    assert argv[:3] == ["python", "-m", "sglang.launch_server"]
    assert ("--enable-return-routed-experts" in argv) is router_replay


@pytest.mark.parametrize("colocated", [False, True])
def test_sglang_can_give_memory_up_where_the_trainer_needs_it(
    monkeypatch: pytest.MonkeyPatch, colocated: bool
) -> None:
    monkeypatch.setattr(commands, "sglang_python", lambda: "python")
    argv = commands.server_command(
        InferenceSection(inference_backend="sglang", colocated=colocated),
        ModelSection(),
        model_path=Path("model"),
        port=30000,
        version=0,
        seed=0,
    )
    assert ("--enable-memory-saver" in argv) is colocated
