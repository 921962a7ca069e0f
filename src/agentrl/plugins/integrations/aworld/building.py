"""Builds AWorld agents from their descriptions and runs tasks with them; calls require `aworld`."""

import asyncio
import importlib
import inspect
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.errors import AgentRLError, ConfigError, UserCodeError
from agentrl.plugins.integrations.agent_worker.description import (
    UNNAMED,
    AWorldAgent,
    AWorldSwarm,
    SwarmShape,
)
from agentrl.plugins.integrations.agent_worker.references import load_object
from agentrl.plugins.integrations.agent_worker.secret_values import resolved
from agentrl.plugins.integrations.aworld.agent_loop import AworldAgentLoop
from agentrl.schema.agent_endpoint import AgentEndpoint

log = logging.getLogger(__name__)

_CLEANUP_SECONDS = 10.0


def build(description: AWorldAgent | AWorldSwarm, endpoint: AgentEndpoint) -> Any:
    """Return a new AWorld `Agent` or `Swarm` whose trained agents call the endpoint."""
    if isinstance(description, AWorldAgent):
        return _build_agent(description, endpoint)
    members = [_build_agent(member, endpoint) for member in description.members]

    # AWorld wraps nested swarms and parallel agents into agents that call no model but still
    # require a model name.
    os.environ.setdefault("LLM_MODEL_NAME", endpoint.model)
    os.environ.setdefault("LLM_API_KEY", "none")
    return _build_swarm(description, members)


def _build_swarm(shape: SwarmShape, members: Sequence[Any]) -> Any:
    """Return a new swarm of these agents, connected as described."""

    def resolve_part(part: Any) -> Any:
        if isinstance(part, list):
            return tuple(resolve_part(item) for item in part)
        if isinstance(part, dict) and "parallel" in part:
            return [resolve_part(item) for item in part["parallel"]]
        if isinstance(part, dict):
            return _build_swarm(SwarmShape.model_validate(part), members)
        return members[part]

    def topology_step(part: Any) -> Any:
        found = resolve_part(part)
        is_flow = shape.build_type == graph.GraphBuildType.WORKFLOW.value
        return _parallel(found) if is_flow and isinstance(found, list) else found

    graph = _aworld("aworld.core.agent.swarm")
    cls = load_object(shape.target, "agent")
    arguments: dict[str, Any] = {"max_steps": shape.max_steps}
    if shape.name != UNNAMED:
        arguments["name"] = shape.name
    if shape.root is not None:
        arguments["root_agent"] = resolve_part(shape.root)
    if cls is graph.Swarm:
        arguments["build_type"] = graph.GraphBuildType(shape.build_type)
    return cls(*map(topology_step, shape.topology), **arguments)


def _parallel(parts: Sequence[Any]) -> Any:
    """Return one agent that runs agents and swarms in parallel.

    AWorld itself passes the next agent an object with their answers, which model APIs reject.
    """
    agents = [_as_agent(part) for part in parts]
    names = {agent.id(): agent.name() for agent in agents}

    def join_answers(parallel_agent: Any, answers: Mapping[str, Any]) -> Any:
        text = "\n\n".join(f"{names[agent]}: {answer}" for agent, answer in answers.items())
        return _aworld("aworld.core.common").ActionModel(
            agent_name=parallel_agent.id(), policy_info=text
        )

    agent_class = _aworld("aworld.agents.parallel_llm_agent").ParallelizableAgent
    name = f"parallel_{'_'.join(names.values())}"
    return agent_class(name=name, agents=agents, aggregate_func=join_answers)


def _as_agent(part: Any) -> Any:
    """Return an agent for a part of a swarm, wrapped as AWorld does."""
    if isinstance(part, list):
        return _parallel(part)
    if isinstance(part, tuple):
        agents = [_as_agent(item) for item in part]
        serial = _aworld("aworld.agents.serial_llm_agent").SerialableAgent
        return serial(name=f"serial_{'_'.join(item.name() for item in agents)}", agents=agents)
    if isinstance(part, _aworld("aworld.core.agent.swarm").Swarm):
        return _aworld("aworld.agents.task_llm_agent").TaskAgent(name=part.name(), swarm=part)
    return part


async def build_with(loop: AworldAgentLoop, endpoint: AgentEndpoint) -> Any:
    """Return the `Agent` or `Swarm` that a loop builds.

    Agents at the rollout's address get its key and protocol. AWorld's loops set verl's provider or
    none, and no key or a placeholder.
    """
    agents = loop.build_agents()
    agents = await agents if inspect.isawaitable(agents) else agents
    for agent in _members(agents):
        llm = agent.conf.get("llm_config") or {}
        if llm.get("llm_base_url") == endpoint.base_url:
            llm.update(llm_provider="openai", llm_api_key=endpoint.api_key)
    return agents


def _members(part: Any) -> Iterator[Any]:
    """Yield the agents of an agent or a swarm that has not run yet."""
    if isinstance(part, list | tuple):
        for item in part:
            yield from _members(item)
    elif hasattr(part, "topology"):
        yield from _members([*part.topology, *part.register_agents])
    else:
        yield part


async def run_task(agents: Any, query: str) -> str | None:
    """Run an AWorld `Agent` or `Swarm` on a question, and return its answer."""
    task_class = _aworld("aworld.core.task").Task
    is_swarm = isinstance(agents, _aworld("aworld.core.agent.swarm").Swarm)
    _keep_memory_in_process()
    task = task_class(
        id=secrets.token_hex(16), input=query, **{"swarm" if is_swarm else "agent": agents}
    )
    try:
        responses = await _aworld("aworld.runner").Runners.run_task(task)
    finally:
        await _release(agents)
    response = responses[task.id]
    if not response.success and response.status not in (None, "success"):
        raise UserCodeError(str(response.msg or response.status))
    answer: str | None = response.answer
    return answer


def _build_agent(description: AWorldAgent, endpoint: AgentEndpoint) -> Any:
    config = _aworld("aworld.config.conf")
    llm = dict(description.llm)
    if description.trained:
        llm |= {
            "llm_provider": "openai",
            "llm_base_url": endpoint.base_url,
            "llm_model_name": endpoint.model,
            "llm_api_key": endpoint.api_key,
        }
    llm = resolved(llm)
    arguments: Mapping[str, Any] = description.arguments
    arguments = {
        key: resolved(value) if key in ("mcp_config", "skill_configs") else value
        for key, value in arguments.items()
    }
    for key, reference in description.references.items():
        value = load_object(reference.removesuffix("()"), "agent")
        arguments[key] = value() if reference.endswith("()") else value
    cls = load_object(description.target, "agent")
    # AWorld derives the random part of an id from the clock, so two agents could share an id.
    agent_id = description.agent_id or f"{description.name}---uuid{secrets.token_hex(3)}uuid"
    # AWorld's other strategy waits for its own messages and continues without late ones.
    memory = {**description.conf.get("memory_config", {}), "history_write_strategy": "direct"}
    settings = {**description.conf, "memory_config": config.AgentMemoryConfig(**memory)}
    conf = config.AgentConfig(llm_config=config.ModelConfig(**llm), **settings)
    return cls(name=description.name, conf=conf, agent_id=agent_id, **arguments)


def _keep_memory_in_process() -> None:
    """Make AWorld keep conversations in this process instead of files in the user's home.

    At each access, its default store reads all conversations that any process has stored there, and
    processes overwrite each other's index. A store chosen by the user's code is kept.
    """
    memory = _aworld("aworld.memory.main")
    if "instance" not in memory.MEMORY_HOLDER:
        memory.MemoryFactory.init(memory.InMemoryMemoryStore())


async def _release(agents: Any) -> None:
    """Close the agents' resources and remove the agents from AWorld, which retains all of them."""
    factory = _aworld("aworld.core.agent.base").AgentFactory
    memory = _aworld("aworld.memory.main")
    store = memory.MemoryFactory.instance().memory_store
    for agent in _all_agents(agents):
        for table in (factory._cls, factory._desc, factory._agent_conf, factory._agent_instance):
            table.pop(agent.id(), None)
        if isinstance(store, memory.InMemoryMemoryStore):
            store.memory_items[:] = [i for i in store.memory_items if i.agent_id != agent.id()]
        if agent.sandbox is None:
            continue
        try:
            async with asyncio.timeout(_CLEANUP_SECONDS):
                await agent.sandbox.cleanup()
        except TimeoutError:
            log.warning(
                "the tools of agent %s did not close within %g s", agent.id(), _CLEANUP_SECONDS
            )


def _all_agents(agents: Any) -> Iterator[Any]:
    """Yield the agents of an agent or a swarm, including those inside AWorld's group wrappers."""
    if hasattr(agents, "agent_graph"):
        for agent in agents.agents.values():
            yield from _all_agents(agent)
        return
    yield agents
    for child in (getattr(agents, "swarm", None), *(getattr(agents, "agents", None) or ())):
        if child is not None:
            yield from _all_agents(child)


def _aworld(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"agent: it requires the package {error.name!r}; create an environment for agents with "
            "scripts/setup_agents aworld FOLDER and run this with its Python"
        ) from None
    except ImportError as error:
        raise AgentRLError(f"agent: importing {module} failed: {error}") from error
