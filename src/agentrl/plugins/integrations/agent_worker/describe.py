"""Converts a user's agent (an object, a function, a class or a path) to a description."""

import inspect
from pathlib import Path
from typing import Any

import yaml

from agentrl.config.named_files import read_text_file
from agentrl.config.user_code import check_agent_function
from agentrl.errors import ConfigError
from agentrl.plugins.integrations.agent_worker.description import AgentDescription, FunctionAgent
from agentrl.plugins.integrations.agent_worker.references import (
    described,
    is_python_reference,
    load_object,
    reference_to,
    resolve_reference,
)
from agentrl.plugins.integrations.aworld.agent_loop import AworldAgentLoop
from agentrl.plugins.integrations.aworld.aworld_agents import (
    agent_from_arguments,
    describe_agent,
    describe_swarm,
    is_agent,
    is_swarm,
)


def describe(agent: Any, folder: Path | None = None) -> tuple[AgentDescription, dict[str, str]]:
    """Return the description of an agent, and the secrets that were removed from it."""
    if isinstance(agent, str | Path):
        return _from_path(str(agent))
    if is_swarm(agent):
        return describe_swarm(agent)
    if is_agent(agent):
        return describe_agent(agent)
    reference = reference_to(agent, "agent", folder) if callable(agent) else ""
    return _describe_callable(agent, reference), {}


def _describe_callable(agent: Any, reference: str) -> FunctionAgent:
    name = getattr(agent, "__name__", type(agent).__name__)
    if isinstance(agent, type) and hasattr(agent, "build_agents"):
        if not issubclass(agent, AworldAgentLoop):
            raise ConfigError(
                f"agent: {name}: derive it from agentrl.integrations.AworldAgentLoop, which gives "
                "it the model's address"
            )
        if inspect.isabstract(agent):
            raise ConfigError(f"agent: {name}: define build_agents(), which returns the agent")
        return FunctionAgent(kind="loop", name=name, reference=reference)
    if callable(agent) and not isinstance(agent, type):
        check_agent_function(agent, f"agent: {name}")
        return FunctionAgent(kind="function", name=name, reference=reference)
    raise ConfigError(
        f"agent: {described(agent)} is not an agent; pass an AWorld Agent or Swarm, a "
        "function (task, endpoint) -> answer, a class with build_agents(), or the path of one"
    )


def _from_path(text: str) -> tuple[AgentDescription, dict[str, str]]:
    if is_python_reference(text):
        if text.endswith(".py"):
            raise ConfigError(f"agent: {text} does not name an agent; write {text}:name")
        reference = resolve_reference(text, "agent")
        found = load_object(reference, "agent")
        if is_swarm(found) or is_agent(found):
            return describe(found)
        return _describe_callable(found, reference), {}
    path = Path(text).expanduser()
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(
            f"agent: {text}: expected a YAML file, or the file.py:name of an agent, a function or "
            "a class with build_agents()"
        )
    try:
        content = yaml.safe_load(read_text_file(path))
    except OSError as error:
        raise ConfigError(f"agent: {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"agent: {path} is not valid YAML: {' '.join(str(error).split())}"
        ) from None
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        return _from_target(content[0], path)
    if not isinstance(content, dict):
        raise ConfigError(f"agent: {path}: expected `name:` and the other arguments of an agent")
    return agent_from_arguments(content, path)


def _from_target(entry: dict[str, Any], path: Path) -> tuple[AgentDescription, dict[str, str]]:
    """Read the entry of an agent loop in a file of verl's `agent_loop_config_path`."""
    target = entry.get("_target_")
    if not isinstance(target, str) or "." not in target:
        raise ConfigError(f"agent: {path}: expected `_target_: package.module.Class`")
    module, _, name = target.rpartition(".")
    neighbor = path.absolute().parent / f"{module}.py"
    reference = f"{neighbor}:{name}" if neighbor.is_file() else f"{module}:{name}"
    return _describe_callable(load_object(reference, "agent"), reference), {}
