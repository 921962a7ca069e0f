"""Runs where AWorld is installed: the same agent as an object and from YAML, for verl, and a swarm.

`python aworld_check.py FOLDER MODEL` writes the runs `object`, `yaml` and `swarm` into the folder, and prints
what the description of a team says, as one line of JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from aworld.agents.llm_agent import Agent
from aworld.agents.parallel_llm_agent import ParallelizableAgent
from aworld.agents.task_llm_agent import TaskAgent
from aworld.config import AgentConfig, ModelConfig
from aworld.core.agent.swarm import Swarm, TeamSwarm
from support.nasty_agent import agent_arguments, write_agent

from agentrl import AgentTrainer
from agentrl.errors import ConfigError
from agentrl.plugins.integrations.agent_worker.describe import describe
from agentrl.plugins.integrations.agent_worker.description import AWorldAgent, AWorldSwarm
from agentrl.plugins.integrations.aworld.building import build
from agentrl.schema.agent_endpoint import AgentEndpoint


def nasty_agent() -> Agent:
    """Return the agent that the YAML file describes, as an object."""
    arguments = agent_arguments()
    llm = ModelConfig(**arguments.pop("conf")["llm_config"])
    return Agent(conf=AgentConfig(llm_config=llm), mcp_servers=["shop"], **arguments)


def nested_names(lead: Agent, expert: Agent) -> object:
    """Describe a swarm with a swarm and parallel agents inside, and return what is built from it."""
    others = [Agent(name=name, conf=AgentConfig()) for name in ("left", "right", "last")]
    inside = Swarm(others[0], expert, name="inside")
    described, secrets = describe(Swarm(lead, [others[1], inside], others[2]))
    os.environ.update(secrets)
    assert isinstance(described, AWorldSwarm)
    described = AWorldSwarm.model_validate(json.loads(described.model_dump_json()))
    endpoint = AgentEndpoint("http://127.0.0.1:1/v1", "policy", "key")

    def names(part: Any) -> object:
        if isinstance(part, ParallelizableAgent):
            return {"parallel": [names(one) for one in part.agents]}
        if isinstance(part, TaskAgent):
            return names(part.swarm)
        if isinstance(part, Swarm):
            return [part.name(), *(names(one) for one in part.topology)]
        return part.name()

    built = build(described, endpoint)
    built.reset("")
    return [names(part) for part in built.topology]


def write_nested_run(folder: Path) -> None:
    """Write the run of a swarm whose middle is an agent beside a swarm of two."""
    names = ("lead", "right", "left", "second", "last")
    lead, right, left, second, last = (
        Agent(name=name, conf=AgentConfig(), system_prompt=f"You are {name}.") for name in names
    )
    AgentTrainer(
        Swarm(lead, [right, Swarm(left, second, name="inside")], last),
        config={"model_name_or_path": sys.argv[2]},
        train_dataset=[{"query": "How many?", "answer": "7"}],
        run_path=folder / "swarm",
    )


def main() -> None:
    """Write the runs, and describe a team."""
    folder = Path(sys.argv[1])
    rows = [{"query": "How many?", "answer": "7"}]
    found: dict[str, object] = {"torch": "torch" in sys.modules}
    for name, agent in (("object", nasty_agent()), ("yaml", write_agent(folder))):
        AgentTrainer(agent, train_dataset=rows, run_path=folder / name, train_engine_name="verl")
        description, _ = describe(agent)
        assert isinstance(description, AWorldAgent)
        made = build(description, AgentEndpoint("http://127.0.0.1:1/v1", "policy", "key"))
        found[name] = {
            "class": type(made).__name__,
            "prompt": made.system_prompt,
            "headers": made.mcp_config["mcpServers"]["shop"]["headers"],
            "servers": made.mcp_servers,
            "llm": [made.conf.llm_config[key] for key in ("llm_base_url", "llm_model_name")],
            "temperature": made.conf.llm_config.llm_temperature,
        }
    write_nested_run(folder)
    own = ModelConfig(llm_base_url="http://other/v1", llm_model_name="other", llm_api_key="k1")
    lead = Agent(name="lead", conf=AgentConfig(), system_prompt="Lead.")
    expert = Agent(name="expert", conf=AgentConfig(llm_config=own), system_prompt="Know.")
    team, secrets = describe(TeamSwarm(lead, expert))
    found["team"] = team.model_dump(mode="json")
    found["secrets"] = secrets
    found["nested"] = nested_names(lead, expert)
    try:
        describe(Swarm(expert))
    except ConfigError as error:
        found["refused"] = str(error)
    assert sys.__stdout__ is not None
    sys.__stdout__.write("\n" + json.dumps(found) + "\n")


main()
