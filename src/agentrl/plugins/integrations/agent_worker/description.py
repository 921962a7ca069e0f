"""Agents as data: descriptions from which other processes rebuild an agent and run it in workers.

Descriptions are plain JSON without secrets.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from agentrl.config.private_files import write_private
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.plugins.integrations.engine_settings import has_package
from agentrl.plugins.integrations.reward_functions import RewardFunction

UNNAMED = "swarm"
"""Name of swarms without a given name; AWorld generates names with this prefix."""
DEFAULT_AGENT_CLASS = "aworld.agents.llm_agent:LLMAgent"


_AGENT_MODULE = '''\
"""Made by AgentRL: runs the agent of agent_workers.json, and registers its reward function."""

from pathlib import Path

from agentrl.plugins.integrations.agent_worker.sampler_agent import agent_in_workers

run_agent = agent_in_workers(Path(__file__).with_name("agent_workers.json"))
'''

_DESCRIBE_TIMEOUT_SECONDS = 300.0
_DESCRIBE = """\
import json, sys
from agentrl.errors import AgentRLError
from agentrl.plugins.integrations.agent_worker.describe import describe
try:
    description, secrets = describe(sys.argv[1])
except AgentRLError as error:
    sys.exit(str(error))
print(json.dumps([description.model_dump(mode="json"), secrets]))
"""


class _FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FunctionAgent(_FrozenModel):
    """A function `async (task, endpoint) -> answer`, or a class with `build_agents()`."""

    kind: Literal["function", "loop"]
    name: str
    reference: str
    """`file.py:name` or `package.module:name`."""


class AWorldAgent(_FrozenModel):
    """The constructor arguments of one AWorld agent."""

    kind: Literal["agent"] = "agent"
    name: str
    agent_id: str = ""
    """The agent's id if other agents use it; empty for a new id in every rollout."""
    target: str = DEFAULT_AGENT_CLASS
    arguments: dict[str, Any] = {}
    """JSON arguments of the constructor."""
    references: dict[str, str] = {}
    """References of arguments that are functions. For stateless objects, the reference of the class
    followed by `()`."""
    conf: dict[str, Any] = {}
    """Values of its `AgentConfig` that differ from the defaults, without its model's settings."""
    llm: dict[str, Any] = {}
    """Settings of its model; for the trained model, those that name the server are omitted."""
    trained: bool = True


class SwarmShape(_FrozenModel):
    """How the agents of an AWorld swarm are connected."""

    name: str
    target: str
    topology: list[Any]
    """The swarm's topology, with each agent replaced by its member number, each tuple by a list,
    each list by `{"parallel": [...]}`, and each nested swarm by its shape."""
    root: Any = None
    build_type: str
    max_steps: int = 0


class AWorldSwarm(SwarmShape):
    """An AWorld swarm: its agents, including those of nested swarms, and their connections."""

    kind: Literal["swarm"] = "swarm"
    members: tuple[AWorldAgent, ...]


AgentDescription = Annotated[FunctionAgent | AWorldAgent | AWorldSwarm, Field(discriminator="kind")]
_ADAPTER: TypeAdapter[AgentDescription] = TypeAdapter(AgentDescription)


class WorkerSettings(_FrozenModel):
    """Settings for starting workers; the content of `agent_workers.json`."""

    python: str
    """The interpreter."""
    processes: int
    """Number of workers in a pool."""
    serial: bool
    """Whether each worker runs one rollout at a time. AWorld requires it: it registers agents by id
    per process, and at the end of a task it closes the tools of every registered agent."""
    agent: dict[str, Any] | None
    reward: str | None
    """The reward function, by reference."""
    reward_form: str | None


def worker_settings(
    description: AgentDescription,
    processes: object,
    reward: RewardFunction | None = None,
    python: str = sys.executable,
) -> WorkerSettings:
    """Return the settings of workers; `processes` are the user's `agent_processes`, or None."""
    serial = description.kind != "function"
    if processes is None:
        processes = 4 if serial else 1
    if not isinstance(processes, int) or processes < 1:
        raise ConfigError(
            f"config: agent_processes must be a whole number from 1, got {processes!r}"
        )
    return WorkerSettings(
        python=python,
        processes=processes,
        serial=serial,
        agent=description.model_dump(mode="json"),
        reward=None if reward is None else reward.reference,
        reward_form=None if reward is None else reward.form,
    )


def write_agent(settings: WorkerSettings, module: Path) -> None:
    """Write the module whose `run_agent` runs the agent in workers, and their settings file."""
    write_worker_settings(settings, module.with_name("agent_workers.json"))
    write_private(module, _AGENT_MODULE)


def write_worker_settings(settings: WorkerSettings, path: Path) -> None:
    """Write settings for `AgentWorkerPool.load`; safe while other samplers read the file."""
    text = json.dumps(settings.model_dump(mode="json"), indent=2, ensure_ascii=False)
    write_private(path, text + "\n")


def check_can_run(description: AgentDescription) -> None:
    """Check that workers, which run in this interpreter, can run the agent."""
    if description.kind in ("agent", "swarm") and importlib.util.find_spec("aworld") is None:
        raise ConfigError(
            f"agent: AWorld is not installed for {sys.executable}, which runs it; create an "
            "environment with scripts/setup_agents aworld FOLDER, and run this with its Python"
        )


def parse_description(value: Mapping[str, Any]) -> AgentDescription:
    """Return the description in a JSON value."""
    return _ADAPTER.validate_python(value)


def with_agent_elsewhere(config: RootConfig, folder: Path) -> RootConfig:
    """Return a configuration whose agent needs only this interpreter."""
    python, agent = config.agents.agent_python, config.agents.agent
    if python is None or agent is None:
        return config
    # Not resolved: Python finds its virtual environment from the location of the symbolic link.
    program = str(python.absolute())
    settings = worker_settings(_describe_with(program, agent), None, python=program)
    folder.mkdir(parents=True, exist_ok=True)
    module = folder.absolute() / "worker_agent.py"
    write_agent(settings, module)
    own = {"agent": f"{module}:run_agent", "agent_python": None}
    return config.model_copy(update={"agents": config.agents.model_copy(update=own)})


def _describe_with(python: str, agent: str) -> AgentDescription:
    if not has_package(python, "agentrl", os.environ):
        raise ConfigError(
            f"--agent_python {python} has no AgentRL; install it there with `{python} -m pip install "
            "--no-deps agentrl-mongo`, and what the agent needs"
        )
    command = [python, "-c", _DESCRIBE, agent]
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DESCRIBE_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--agent {agent}: its import did not finish within {_DESCRIBE_TIMEOUT_SECONDS:g} s"
        ) from None
    lines = (process.stderr if process.returncode else process.stdout).strip().splitlines() or [""]
    if process.returncode != 0:
        raise ConfigError(f"--agent {lines[-1].removeprefix('agent: ') or 'its import crashed'}")
    try:
        description, secrets = json.loads(lines[-1])
        parsed = parse_description(description)
    except (ValueError, TypeError):
        raise ConfigError(
            f"--agent {agent}: importing its module exits the program, or prints at exit"
        ) from None
    os.environ.update(secrets)
    return parsed
