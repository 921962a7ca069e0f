"""Plugins: found, left out if broken, and used like AgentRL's own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl import plugin_registry
from agentrl.cli.main import commands
from agentrl.config.loading import build_config
from agentrl.errors import ConfigError
from agentrl.plugin_registry import Plugin, PluginCommand, hooks, imported, loaded_hook
from agentrl.renderers.tool_calls.call_format_registry import get_tool_call_format
from agentrl.renderers.tool_calls.json_calls import HERMES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example plugin, as `pip install` leaves it."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(ROOT / "examples/plugin")], check=True)
    return target


def agentrl(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentrl", *arguments],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_example_is_installed_and_found(installed: Path, tmp_path: Path) -> None:
    listed = agentrl(installed, "--help", cwd=tmp_path)
    assert "sums        print generated sums" in listed.stdout
    printed = agentrl(installed, "sums", "--count", "2", cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    assert len(printed.stdout.splitlines()) == 2
    model = str(ROOT / "assets/demo/model")
    planned = agentrl(
        installed,
        *("run", "--run_name", "sums", "--env", "sums:addition?size=64", "--dry_run"),
        *("--model_name_or_path", model, "--max_steps", "2"),
        cwd=tmp_path,
    )
    assert "note: --env sums:addition?size=64: 64 tasks" in planned.stdout, planned.stderr
    wrong = agentrl(
        installed,
        *("run", "--run_name", "sums", "--env", "sums:addition?size=-1", "--dry_run"),
        *("--model_name_or_path", model),
        cwd=tmp_path,
    )
    assert "size is a number from 1 to 1000000" in wrong.stdout + wrong.stderr


def test_a_plugin_that_cannot_be_imported_is_named_and_left_out(
    installed: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    subprocess.run(["cp", "-r", str(installed), str(site)], check=True)
    (site / "agentrl_sums/__init__.py").write_text("import something_that_is_missing")
    listed = agentrl(site, "--help", cwd=tmp_path)
    assert listed.returncode == 0
    assert "sums" not in listed.stdout
    assert "the plugin 'sums' of agentrl-sums cannot be imported (ModuleNotFoundError" in (
        listed.stderr
    )
    assert "inspect" in listed.stdout
    examined = agentrl(site, "doctor", cwd=tmp_path)
    assert re.search(r"FAIL +plugins +the plugin 'sums' of agentrl-sums cannot", examined.stdout)


def test_two_plugins_with_the_same_name_are_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Plugin(task_sources={"sums": "a:A"})
    monkeypatch.setattr(plugin_registry, "installed_plugins", lambda: {"a": one, "b": one})
    with pytest.raises(ConfigError, match="plugins 'a' and 'b' both have 'sums' in task_sources"):
        hooks("task_sources")


def test_what_does_not_exist_is_one_line() -> None:
    for target in ("agentrl.nowhere:THING", "agentrl.errors:THING"):
        with pytest.raises(ConfigError, match=f"a plugin names {target}, which does not exist"):
            imported(target)
    assert loaded_hook("servers", "unknown") is None


def test_a_plugin_cannot_replace_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Plugin(
        commands={"run": PluginCommand("a:A", "theirs"), "new": PluginCommand("a:A", "")}
    )
    monkeypatch.setattr("agentrl.cli.main.installed_plugins", lambda: {"theirs": theirs})
    commands.cache_clear()
    try:
        assert commands()["run"].summary != "theirs"
        assert "new" in commands()
    finally:
        commands.cache_clear()


def test_a_format_of_tool_calls_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "agentrl.renderers.tool_calls.json_calls:HERMES"
    mine = Plugin(tool_call_formats={"from_a_plugin": target})
    monkeypatch.setattr(plugin_registry, "installed_plugins", lambda: {"mine": mine})
    assert get_tool_call_format("from_a_plugin") is HERMES
    with pytest.raises(ConfigError, match=r"did you mean 'from_a_plugin'\?"):
        get_tool_call_format("from_a_plugins")


def test_an_unknown_server_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"--inference_backend vllm: unknown \(known: sglang, emb"
    ):
        build_config({"inference_backend": "vllm", "model_name_or_path": "m"})


def test_everything_that_agentrls_own_plugins_name_exists() -> None:
    for plugin in plugin_registry.installed_plugins().values():
        for command in plugin.commands.values():
            assert callable(imported(command.target))
    for kind in ("servers", "task_sources", "run_checks", "run_preparations", "exports"):
        for name in hooks(kind):
            assert loaded_hook(kind, name) is not None
