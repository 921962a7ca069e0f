"""Command lines of inference servers."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import SecretStr

from agentrl.config.sections import InferenceSection, ModelSection
from agentrl.errors import ConfigError
from agentrl.inference.supervisor import server_commands as commands


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
    assert [argv[0], Path(argv[1]).name] == ["python", "sglang_starter.py"]
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


@pytest.mark.parametrize("backend", ["embedded", "sglang"])
def test_no_key_stands_among_a_servers_arguments(
    monkeypatch: pytest.MonkeyPatch, backend: Literal["embedded", "sglang"]
) -> None:
    monkeypatch.setattr(commands, "sglang_python", lambda: "python")
    argv = commands.server_command(
        InferenceSection(
            inference_backend=backend,
            inference_api_key=SecretStr("data-key"),
            inference_admin_key=SecretStr("admin-key"),
        ),
        ModelSection(),
        model_path=Path("model"),
        port=30000,
        version=0,
        seed=0,
    )
    assert "-key" not in " ".join(argv)


def test_servers_for_other_machines_want_a_key_of_their_own_for_control() -> None:
    reachable = InferenceSection(inference_host="10.0.0.1", inference_api_key=SecretStr("data"))
    with pytest.raises(ConfigError, match="set AGENTRL_ADMIN_KEY as well"):
        commands.check_keys(reachable)
    commands.check_keys(reachable.model_copy(update={"inference_admin_key": SecretStr("admin")}))
