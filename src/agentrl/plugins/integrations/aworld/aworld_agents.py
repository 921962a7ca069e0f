"""Converts AWorld's agents and swarms, and YAML files with an agent's arguments, to descriptions.

AWorld itself is imported only if one of its objects is given.
"""

import enum
import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agentrl.errors import ConfigError
from agentrl.plugins.integrations.agent_worker.description import (
    DEFAULT_AGENT_CLASS,
    UNNAMED,
    AWorldAgent,
    AWorldSwarm,
    SwarmShape,
)
from agentrl.plugins.integrations.agent_worker.references import reference_to
from agentrl.plugins.integrations.agent_worker.secret_values import SecretValues

LLM_KEYS = (
    *("llm_provider", "llm_model_name", "llm_base_url", "llm_api_key", "llm_client_type"),
    *("params", "llm_response_parser"),
)
"""Settings of an agent's model that name its server; the trained agent's are replaced."""

# Attribute of an AWorld agent -> the constructor's parameter. Those that are not JSON follow below.
_ATTRIBUTES = {
    "_desc": "desc",
    "system_prompt": "system_prompt",
    "tool_names": "tool_names",
    "handoffs": "agent_names",
    "mcp_config": "mcp_config",
    "mcp_servers": "mcp_servers",
    "feedback_tool_result": "feedback_tool_result",
    "wait_tool_result": "wait_tool_result",
    "black_tool_actions": "black_tool_actions",
    "skill_configs": "skill_configs",
    "event_handler_name": "event_handler_name",
    "use_tools_in_prompt": "use_tools_in_prompt",
    "step_reset": "step_reset",
    "need_reset": "need_reset",
    "llm_max_attempts": "llm_max_attempts",
    "llm_retry_delay": "llm_retry_delay",
    "max_loop_steps": "max_loop_steps",
}
_ARGUMENTS_WITH_SECRETS = ("mcp_config", "skill_configs")


def is_agent(value: Any) -> bool:
    """Return whether a value is an AWorld agent."""
    return _has_base(value, "BaseAgent")


def is_swarm(value: Any) -> bool:
    """Return whether a value is an AWorld swarm."""
    return _has_base(value, "Swarm")


def agent_from_arguments(values: dict[str, Any], path: Path) -> tuple[AWorldAgent, dict[str, str]]:
    """Return the description of an agent from its constructor's arguments, and its secrets."""
    known = {"name", "conf", "class", *_ATTRIBUTES.values()}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(
            f"agent: {path}: unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}"
        )
    name = values.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"agent: {path}: `name` is missing")
    secrets = SecretValues(f"AGENTRL_{name}")
    conf = dict(values.get("conf") or {})
    llm = {**dict(conf.pop("llm_config", None) or {})}
    llm |= {key: conf.pop(key) for key in list(conf) if key.startswith("llm_")}
    arguments = {key: item for key, item in values.items() if key not in ("name", "conf", "class")}
    for key in _ARGUMENTS_WITH_SECRETS:
        if key in arguments:
            arguments[key] = secrets.replaced(arguments[key], (key,))
    if arguments.get("mcp_config") and "mcp_servers" not in arguments:
        arguments["mcp_servers"] = list(arguments["mcp_config"].get("mcpServers", {}))
    description = AWorldAgent(
        name=name,
        target=_class_reference(values.get("class")),
        arguments=_checked(arguments, f"agent: {path}"),
        conf=_checked(conf, f"agent: {path}: conf"),
        llm=secrets.replaced({key: v for key, v in llm.items() if key not in LLM_KEYS}, ("llm",)),
    )
    return description, secrets.environment


def _class_reference(name: str | None) -> str:
    if name is None:
        return DEFAULT_AGENT_CLASS
    return name if ":" in name else ":".join(name.rsplit(".", 1))


def describe_swarm(swarm: Any) -> tuple[AWorldSwarm, dict[str, str]]:
    """Return the description of a `Swarm`, and its agents' secrets."""
    secrets = SecretValues(f"AGENTRL_{_swarm_name(swarm)}")
    agents: list[Any] = []
    shape = _shape(swarm, agents)
    has_own_model = [bool(_llm(agent).get("llm_base_url")) for agent in agents]
    if all(has_own_model):
        raise ConfigError(
            "agent: every agent of the swarm has its own llm_base_url; remove it from the agents "
            "to train"
        )
    members = [
        _agent(agent, secrets, trained=not own)
        for agent, own in zip(agents, has_own_model, strict=True)
    ]
    names = [member.name for member in members]
    description = AWorldSwarm(
        **shape.model_dump(),
        members=tuple(
            # Handoffs refer to an agent by its id, which the model sees.
            member.model_copy(update={"agent_id": f"{member.name}{_suffix(number, names)}"})
            for number, member in enumerate(members)
        ),
    )
    return description, secrets.environment


def _shape(swarm: Any, agents: list[Any]) -> SwarmShape:
    """Return the connections of a swarm; agents missing in `found` are appended to it."""

    def number_of(part: Any) -> Any:
        if isinstance(part, list):
            return {"parallel": [number_of(item) for item in part]}
        if isinstance(part, tuple):
            return [number_of(item) for item in part]
        if is_swarm(part):
            return _shape(part, agents).model_dump()
        if not any(part is agent for agent in agents):
            agents.append(part)
        return next(number for number, agent in enumerate(agents) if agent is part)

    topology = [number_of(part) for part in swarm.topology]
    root = getattr(swarm.builder, "root_agent", None)
    return SwarmShape(
        name=_swarm_name(swarm),
        target=f"{type(swarm).__module__}:{type(swarm).__qualname__}",
        topology=topology,
        root=None if root is None else number_of(root),
        build_type=swarm.build_type,
        max_steps=swarm.max_steps,
    )


def _swarm_name(swarm: Any) -> str:
    """Return a swarm's name, or `UNNAMED` if AWorld generated it."""
    return UNNAMED if re.fullmatch(r"swarm_[0-9a-f]{32}", swarm.name()) else swarm.name()


def _suffix(number: int, names: list[str]) -> str:
    return "" if names.count(names[number]) == 1 else f"_{number}"


def describe_agent(agent: Any) -> tuple[AWorldAgent, dict[str, str]]:
    """Return the description of an `Agent`, and its secrets."""
    secrets = SecretValues(f"AGENTRL_{agent.name()}")
    return _agent(agent, secrets, trained=True), secrets.environment


def _agent(agent: Any, secrets: SecretValues, *, trained: bool) -> AWorldAgent:
    where = f"agent {agent.name()!r}"
    arguments = {}
    for attribute, parameter in _ATTRIBUTES.items():
        value = getattr(agent, attribute, None)
        if parameter in _ARGUMENTS_WITH_SECRETS:
            value = secrets.replaced(value, (agent.name(), parameter))
        if value is not None:
            arguments[parameter] = value
    arguments.update(_own_parameters(agent))
    llm = _llm(agent)
    if trained:
        llm = {key: value for key, value in llm.items() if key not in LLM_KEYS}
    return AWorldAgent(
        name=agent.name(),
        target=reference_to(type(agent), where),
        arguments=_checked(arguments, where),
        references=_references(agent),
        conf=_checked(_changed_conf(agent), f"{where}: conf"),
        llm=_checked(secrets.replaced(llm, (agent.name(), "llm")), f"{where}: llm_config"),
        trained=trained,
    )


def _references(agent: Any) -> dict[str, str]:
    """Return the functions and parsers that were given to an agent."""
    where = f"agent {agent.name()!r}"
    references = {}
    aggregate = getattr(agent, "tools_aggregate_func", None)
    if aggregate is not None and getattr(aggregate, "__self__", None) is not agent:
        references["tool_aggregate_func"] = reference_to(aggregate, f"{where}: tool_aggregate_func")
    parser = getattr(agent, "output_converter", None)
    if parser is not None and type(parser).__name__ != "LlmOutputParser":
        what = f"{where}: model_output_parser"
        is_function = hasattr(parser, "__qualname__")
        references["model_output_parser"] = (
            reference_to(parser, what) if is_function else reference_to(type(parser), what) + "()"
        )
    return references


def _own_parameters(agent: Any) -> dict[str, Any]:
    """Return the arguments of a subclass's constructor that AWorld's lacks, from its attributes."""
    if type(agent).__module__.startswith("aworld."):
        return {}
    code = type(agent).__init__.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    base = {"self", "name", "conf", "agent_id", *_ATTRIBUTES.values()}
    names = [name for name in code.co_varnames[:count] if name not in base]
    return {name: getattr(agent, name) for name in names if hasattr(agent, name)}


def _llm(agent: Any) -> dict[str, Any]:
    """Return the settings of an agent's model that differ from AWorld's defaults."""
    given = _plain(agent.conf.get("llm_config") or {})
    default = _plain(_defaults("ModelConfig"))
    return {
        key: value
        for key, value in given.items()
        if key not in ("llm_response_parser", "max_model_len")
        and value is not None
        and default.get(key) != value
    }


def _changed_conf(agent: Any) -> dict[str, Any]:
    default = _plain(_defaults("AgentConfig"))
    given = _plain(dict(agent.conf))
    return {
        key: value
        for key, value in given.items()
        if key not in ("llm_config", "system_prompt") and default.get(key) != value
    }


def _defaults(class_name: str) -> Any:
    return getattr(importlib.import_module("aworld.config.conf"), class_name)().model_dump()


def _plain(value: Any) -> Any:
    """Return a copy in which enumeration members are replaced by their values."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, BaseModel):
        return _plain(value.model_dump())
    return value.value if isinstance(value, enum.Enum) else value


def _checked(values: dict[str, Any], where: str) -> dict[str, Any]:
    for key, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{where}: {key} is a {type(value).__name__}, which cannot be written to a file; "
                "create the agent in a function (task, endpoint) -> answer and pass that"
            ) from None
    return values


def _has_base(value: Any, name: str) -> bool:
    return any(
        base.__name__ == name and base.__module__.startswith("aworld.")
        for base in type(value).__mro__
    )
