"""Hosts: the user's code in a process of its own."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.function_agents import contains_answer, failing_agent, shop_agent, threaded_agent

from agentrl.integrations.agent_worker.describe import describe
from agentrl.integrations.agent_worker.worker_pool import (
    AgentFailed,
    AgentHosts,
    HostFailed,
    HostSettings,
)
from agentrl.integrations.aworld.building import Endpoint
from agentrl.integrations.reward_functions import check_reward_function
from agentrl.schema import MCPTask

TASK = MCPTask(id="t", query="How many?")
ENDPOINT = Endpoint("http://127.0.0.1:9/v1", "train-model", "key")


SLOW = Path(__file__).parents[2] / "support/slow_agent.py"
_made: list[AgentHosts] = []


def hosts_for(agent: Any, reward: Any = None, **changes: Any) -> AgentHosts:
    described = None if reward is None else check_reward_function(reward)
    settings = HostSettings(
        python=sys.executable,
        processes=1,
        serial=False,
        takes_all=False,
        agent=describe(agent)[0].model_dump(mode="json"),
        reward=described and described.reference,
        reward_form=described and described.form,
    )
    _made.append(AgentHosts(settings.model_copy(update=changes)))
    return _made[-1]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root / "src"), str(root / "tests")]))
    yield
    while _made:
        _made.pop().close()


async def test_a_plain_function_answers_and_may_print() -> None:
    hosts = hosts_for(threaded_agent)
    answers = await asyncio.gather(*(hosts.play(TASK, ENDPOINT) for _ in range(20)))
    assert answers == ["How many? at http://127.0.0.1:9/v1"] * 20


async def test_what_the_agent_raises_is_the_agents_failure() -> None:
    with pytest.raises(AgentFailed, match="ValueError: my own mistake"):
        await hosts_for(failing_agent).play(TASK, ENDPOINT)


async def test_a_model_that_cannot_be_reached_is_not_the_agents_failure() -> None:
    with pytest.raises(HostFailed, match="ConnectError"):
        await hosts_for(shop_agent).play(TASK, ENDPOINT)


async def test_the_reward_function_is_called_where_the_agent_runs() -> None:
    hosts = hosts_for(threaded_agent, contains_answer)
    arguments = {"data_source": "", "ground_truth": "7", "extra_info": {}}
    assert await hosts.reward({**arguments, "solution_str": "<answer>7</answer>"}) == 1.0
    assert await hosts.reward({**arguments, "solution_str": "7"}) == 0.0


async def test_a_host_that_dies_fails_its_rollouts_and_another_takes_its_place() -> None:
    hosts = hosts_for(f"{SLOW}:slow_agent")
    playing = asyncio.create_task(hosts.play(TASK, ENDPOINT))
    async with asyncio.timeout(30):
        while not (hosts._hosts and hosts._hosts[0].num_busy):
            await asyncio.sleep(0.01)
        hosts._hosts[0]._process.send_signal(signal.SIGKILL)
        with pytest.raises(HostFailed, match="ended with status -9"):
            await playing
        quick = TASK.model_copy(update={"query": "quick"})
        assert await hosts.play(quick, ENDPOINT) == "quick"


async def test_a_rollout_that_is_given_up_is_cancelled_in_its_host() -> None:
    hosts = hosts_for(f"{SLOW}:slow_agent")
    quick = TASK.model_copy(update={"query": "quick"})
    assert await hosts.play(quick, ENDPOINT) == "quick"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await hosts.play(TASK, ENDPOINT)
    assert hosts._hosts[0].num_busy == 0
    told = TASK.model_copy(update={"query": "cancelled?"})
    assert await hosts.play(told, ENDPOINT) == "1"


async def test_serial_hosts_play_one_rollout_at_a_time_each() -> None:
    hosts = hosts_for(f"{SLOW}:counting_agent", serial=True, processes=2)
    most = await asyncio.gather(*(hosts.play(TASK, ENDPOINT) for _ in range(8)))
    assert set(most) == {"1"}
    assert len(hosts._hosts) == 2


async def test_a_serial_host_that_played_its_share_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentrl.integrations.agent_worker.worker_pool._PLAYS_OF_A_SERIAL_HOST", 2)
    hosts = hosts_for(f"{SLOW}:process_agent", serial=True)
    processes = [await hosts.play(TASK, ENDPOINT) for _ in range(5)]
    assert processes[0] == processes[1]
    assert processes[2] == processes[3]
    assert len(set(processes)) == 3


async def test_an_agent_that_cannot_be_imported_is_said(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def play(task, llm_base_url): return ''\n")
    hosts = hosts_for(f"{path}:play")
    path.write_text("import no_such_package\n")
    with pytest.raises(HostFailed, match=r": ModuleNotFoundError"):
        await hosts.play(TASK, ENDPOINT)
