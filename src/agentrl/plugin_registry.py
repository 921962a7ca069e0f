"""Plugins: what a run may want and the kernel does without, found by entry point.

A distribution describes what it adds in a `Plugin` and registers it in the entry point group
`agentrl.plugins`:

    [project.entry-points."agentrl.plugins"]
    my_plugin = "my_package:PLUGIN"

Everything in it is named as `package.module:name` and imported on use, so that a description costs
nothing. AgentRL's own plugins are registered in the same way (docs/plugins.md).
"""

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from agentrl.errors import ConfigError

GROUP = "agentrl.plugins"
Hook = Literal[
    "servers",
    "task_sources",
    "run_checks",
    "run_preparations",
    "gpu_demands",
    "exports",
    "agent_interpreters",
    "training_engines",
    "tool_call_formats",
]
"""Fields of `Plugin` other than its commands."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PluginCommand:
    """A command of `agentrl`."""

    target: str
    """A click command, as `package.module:name`."""
    summary: str
    """Its line in `agentrl --help`."""


@dataclass(frozen=True)
class Plugin:
    """What a distribution adds, by name; values are `package.module:name`."""

    commands: Mapping[str, PluginCommand] = field(default_factory=dict)
    servers: Mapping[str, str] = field(default_factory=dict)
    """Inference servers, by `--inference_backend`: an `agentrl.inference.supervisor.server_backend.
    ServerBackend`."""
    task_sources: Mapping[str, str] = field(default_factory=dict)
    """Sources of tasks, by the KIND of `--env KIND:NAME`: an `agentrl.datasets.task_source.TaskSource`."""
    run_checks: Mapping[str, str] = field(default_factory=dict)
    """Checks before a run starts, by subject: an `agentrl.launcher.checks.run_check.CheckRun`."""
    run_preparations: Mapping[str, str] = field(default_factory=dict)
    """Work before a run's processes start: functions `(config)` that return an
    `agentrl.launcher.training_run.Preparation` or None."""
    gpu_demands: Mapping[str, str] = field(default_factory=dict)
    """What trainer and servers need of a GPU that they share: an `agentrl.launcher.cluster.gpu_sharing.
    MeasureDemand`, by its method; one is used."""
    exports: Mapping[str, str] = field(default_factory=dict)
    """Formats of `agentrl store export`: an `agentrl.cli.run_formats.RunExport`."""
    agent_interpreters: Mapping[str, str] = field(default_factory=dict)
    """How agents of another interpreter are called, by flag: functions `(config, folder) -> config`
    that make them agents of this one."""
    training_engines: Mapping[str, str] = field(default_factory=dict)
    """Engines of `AgentTrainer`, by `train_engine_name`: a `TrainerProcessor`."""
    tool_call_formats: Mapping[str, str] = field(default_factory=dict)
    """Formats of tool calls, by `--tool_call_parser`: an `agentrl.renderers.ToolCallFormat`."""


def installed_plugins() -> Mapping[str, Plugin]:
    """Return the plugins that can be imported, by name.

    One that cannot be is named in a warning: a defect of it stops nothing that does without it.
    """
    return {name: one for name, one in _found().items() if isinstance(one, Plugin)}


def broken_plugins() -> Mapping[str, str]:
    """Return why plugins are left out, by name."""
    return {name: one for name, one in _found().items() if isinstance(one, str)}


def hooks(kind: Hook) -> dict[str, str]:
    """Return what the plugins add of a kind, by name."""
    found: dict[str, str] = {}
    owners: dict[str, str] = {}
    for owner, plugin in installed_plugins().items():
        for name, target in getattr(plugin, kind).items():
            if name in found:
                raise ConfigError(
                    f"the plugins {owners[name]!r} and {owner!r} both have {name!r} in {kind}; "
                    "uninstall one of them"
                )
            found[name], owners[name] = target, owner
    return found


def loaded_hook(kind: Hook, name: str) -> Any:
    """Return what a plugin adds under a name; None if no plugin has it."""
    target = hooks(kind).get(name)
    return None if target is None else imported(target)


def required_hook(kind: Hook, name: str, flag: str) -> Any:
    """Return what a plugin adds under a name, for a flag that needs it."""
    found = loaded_hook(kind, name)
    if found is None:
        raise ConfigError(f"--{flag}: no installed plugin supports it ({kind}: {name})")
    return found


def imported(target: str) -> Any:
    """Return the object that `package.module:name` names."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        missing = getattr(error, "name", None)
        if missing is not None and not f"{module}.".startswith(f"{missing}.") and missing != name:
            raise  # a dependency, whose absence the plugin's own code explains
        raise ConfigError(f"a plugin names {target}, which does not exist: {error}") from error


@cache
def _found() -> Mapping[str, Plugin | str]:
    """Return each plugin, or the problem with it."""
    found = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        one = found[entry.name] = _loaded(entry)
        if isinstance(one, str):
            logger.warning("the plugin %r %s and is left out", entry.name, one)
    return found


def _loaded(entry: EntryPoint) -> Plugin | str:
    owner = entry.dist.name if entry.dist is not None else "an unknown distribution"
    try:
        plugin = entry.load()
    except Exception as error:  # noqa: BLE001 - code of somebody else, which may raise anything
        return f"of {owner} cannot be imported ({type(error).__name__}: {error})"
    return plugin if isinstance(plugin, Plugin) else f"of {owner} is no Plugin"
