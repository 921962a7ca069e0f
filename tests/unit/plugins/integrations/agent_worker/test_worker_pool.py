"""Workers: the user's code in processes of its own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.function_agents import (
    by_calls,
    contains_answer,
    failing_agent,
    rewarding_agent,
    shop_agent,
    threaded_agent,
)

from agentrl.errors import AgentWorkerError, ConfigError, UserCodeError
from agentrl.plugins.integrations.agent_worker.describe import describe
from agentrl.plugins.integrations.agent_worker.description import worker_settings
from agentrl.plugins.integrations.agent_worker.engine_session import EngineAgent, EngineReply
from agentrl.plugins.integrations.agent_worker.references import load_object
from agentrl.plugins.integrations.agent_worker.worker_pool import AgentWorkerPool
from agentrl.plugins.integrations.reward_functions import check_reward_function
from agentrl.rewards.rollout_view import CallSeen, Rollout
from agentrl.schema import AgentResult, GroundTruth, MCPTask
from agentrl.schema.agent_endpoint import AgentEndpoint

TASK = MCPTask(id="t", query="How many?")
ENDPOINT = AgentEndpoint("http://127.0.0.1:9/v1", "train-model", "key")


SLOW = Path(__file__).parents[4] / "support/slow_agent.py"
_made: list[AgentWorkerPool] = []


def workers_for(agent: Any, reward: Any = None, **changes: Any) -> AgentWorkerPool:
    described = None if reward is None else check_reward_function(reward)
    settings = worker_settings(describe(agent)[0], 1, described)
    _made.append(AgentWorkerPool(settings.model_copy(update=changes)))
    return _made[-1]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = Path(__file__).parents[5]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root / "src"), str(root / "tests")]))
    yield
    while _made:
        _made.pop().close()


async def test_a_plain_function_answers_and_may_print() -> None:
    workers = workers_for(threaded_agent)
    answers = await asyncio.gather(*(workers.run(TASK, ENDPOINT) for _ in range(20)))
    assert [result.answer for result in answers] == ["How many? at http://127.0.0.1:9/v1"] * 20


async def test_a_reward_and_its_figures_reach_the_sampler() -> None:
    result = await workers_for(rewarding_agent).run(TASK, ENDPOINT)
    assert result == AgentResult("7", 0.5, [0.25, None], {"won": 1.0})
    impossible = TASK.model_copy(update={"query": "nan"})
    with pytest.raises(AgentWorkerError, match="reward is nan, not a finite number"):
        await workers_for(rewarding_agent).run(impossible, ENDPOINT)


async def test_an_engine_that_rewards_by_a_function_refuses_an_agents_own_reward() -> None:
    async def never_asked(messages: Any, tools: Any) -> EngineReply:
        raise AssertionError

    agent = EngineAgent(workers_for(rewarding_agent))
    with pytest.raises(AgentWorkerError, match="this engine uses reward_func"):
        await agent.run(TASK, never_asked)
    await agent.close()


async def test_what_the_agent_raises_is_the_agents_failure() -> None:
    with pytest.raises(UserCodeError, match="ValueError: my own mistake"):
        await workers_for(failing_agent).run(TASK, ENDPOINT)


async def test_a_model_that_cannot_be_reached_is_not_the_agents_failure() -> None:
    with pytest.raises(AgentWorkerError, match="ConnectError"):
        await workers_for(shop_agent).run(TASK, ENDPOINT)


async def test_the_reward_function_is_called_where_the_agent_runs() -> None:
    workers = workers_for(threaded_agent, contains_answer)
    arguments = {"data_source": "", "ground_truth": "7", "extra_info": {}}
    assert await workers.reward({**arguments, "solution_str": "<answer>7</answer>"}) == 1.0
    assert await workers.reward({**arguments, "solution_str": "7"}) == 0.0


async def test_a_reward_function_sees_what_was_done() -> None:
    truth = GroundTruth(query="q", columns={"user": "mara"})
    call = CallSeen("close", {"user": "mara"}, "closed", is_error=False, turn=0)
    said = {"role": "user", "content": "q"}
    workers = workers_for(threaded_agent, by_calls)
    for calls, value in (([call], 1.0), ([], 0.0)):
        seen = Rollout("turns_limit", [said], calls, ("clerk",), truth.columns)
        assert Rollout.from_json(json.loads(json.dumps(seen.to_json()))) == seen
        given = [None, truth.model_dump(mode="json"), seen.to_json()]
        assert await workers.reward({"positional": given}) == value


async def test_a_worker_that_dies_fails_its_rollouts_and_another_takes_its_place() -> None:
    workers = workers_for(f"{SLOW}:slow_agent")
    running = asyncio.create_task(workers.run(TASK, ENDPOINT))
    async with asyncio.timeout(60):
        while not workers.num_busy:
            await asyncio.sleep(0.01)
        os.kill(workers.process_ids[0], signal.SIGKILL)
        with pytest.raises(AgentWorkerError, match="was killed by SIGKILL"):
            await running
        quick = TASK.model_copy(update={"query": "quick"})
        assert (await workers.run(quick, ENDPOINT)).answer == "quick"


async def test_a_rollout_that_is_given_up_is_cancelled_in_its_worker() -> None:
    workers = workers_for(f"{SLOW}:slow_agent")
    quick = TASK.model_copy(update={"query": "quick"})
    assert (await workers.run(quick, ENDPOINT)).answer == "quick"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await workers.run(TASK, ENDPOINT)
    assert workers.num_busy == 0
    told = TASK.model_copy(update={"query": "cancelled?"})
    assert (await workers.run(told, ENDPOINT)).answer == "1"


async def test_serial_workers_run_one_rollout_at_a_time_each() -> None:
    workers = workers_for(f"{SLOW}:counting_agent", serial=True, processes=2)
    most = await asyncio.gather(*(workers.run(TASK, ENDPOINT) for _ in range(8)))
    assert {result.answer for result in most} == {"1"}
    assert len(workers.process_ids) == 2


async def test_a_serial_worker_that_did_its_share_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "agentrl.plugins.integrations.agent_worker.worker_pool._MAX_ROLLOUTS_PER_SERIAL_WORKER", 2
    )
    workers = workers_for(f"{SLOW}:process_agent", serial=True)
    processes = [(await workers.run(TASK, ENDPOINT)).answer for _ in range(5)]
    assert processes[0] == processes[1]
    assert processes[2] == processes[3]
    assert len(set(processes)) == 3


async def test_an_agent_that_cannot_be_imported_is_said(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def play(task, endpoint): return ''\n")
    workers = workers_for(f"{path}:play")
    path.write_text("import no_such_package\n")
    with pytest.raises(AgentWorkerError, match=r": ModuleNotFoundError"):
        await workers.run(TASK, ENDPOINT)


async def test_what_a_notebook_defines_runs_with_all_that_it_uses(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    # An interpreter that reads its program from stdin has no file either.
    cells = f"""
import asyncio, dataclasses
from pathlib import Path
from agentrl.plugins.integrations.agent_worker.describe import describe
from agentrl.plugins.integrations.agent_worker.description import worker_settings
from agentrl.plugins.integrations.agent_worker.worker_pool import AgentWorkerPool
from agentrl.plugins.integrations.reward_functions import check_reward_function
from agentrl.schema import MCPTask
from agentrl.schema.agent_endpoint import AgentEndpoint

FACTOR = 2

def helper(text):
    return FACTOR * len(text)

async def play(task, endpoint):
    return f"{{helper(task.query)}} at {{endpoint.model}}"

folder = Path({str(tmp_path)!r})
description, _ = describe(play, folder)
reward = check_reward_function(lambda answer, truth: helper(answer) + truth["answer"], folder)

async def main():
    pool = AgentWorkerPool(worker_settings(description, 1, reward))
    try:
        result = await pool.run(MCPTask(id="t", query="four"), AgentEndpoint("u", "m", "k"))
        truth = {{"query": "q", "answer": 1}}
        print(result.answer, await pool.reward({{"positional": ["abc", truth]}}))
    finally:
        pool.close()

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-"], input=cells, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "8 at m 7.0\n", done.stderr[-2000:]
    pickled = tmp_path / "agent.pkl"
    assert pickled.stat().st_mode & 0o077 == 0
    pickled.chmod(0o660)
    with pytest.raises(ConfigError, match="it is writable by others"):
        load_object(f"{pickled}:agent", "agent")
