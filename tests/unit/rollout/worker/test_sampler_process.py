import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.scripted_engine import ScriptedEngine, serve_script
from harness.server_heartbeats import kept_registered
from harness.tiny_tokenizer import write_tokenizer
from support.command_lines import words_of
from support.patience import PATIENCE
from support.play import begin_run, run_tool_server, service, tool_call
from support.scrape import scrape_until

from agentrl.renderers.renderer import Renderer
from agentrl.runtime.ports import free_port
from agentrl.runtime.processes.signals import SAME_SIGNAL_SECONDS
from agentrl.schema import MCPTask, Record, rebuild_prompts
from agentrl.store import TrajectoryStore

# Every test starts processes and waits for events of theirs, which take long on a busy machine.
pytestmark = pytest.mark.timeout(400)

LEASE_SECONDS = 5
"""Of samplers that are killed: short, as the test waits for its end, and longer than a stall."""
FOREVER = 3600
"""Seconds that a tool call takes which nobody waits for."""
ANSWER = "<answer>7</answer>"
STARTER = """
import sys
from agentrl.config.command_line import parse_flags
from agentrl.rollout.worker.sampler_process import run_sampler
sys.exit(run_sampler(parse_flags(sys.argv[1:])))
"""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tools_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_tool_server(tmp_path_factory.mktemp("tools") / "log") as url:
        yield url


@pytest.fixture
def start(
    mongo_uri: str, model_dir: Path, tools_url: str, tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts sampler processes, and ends those that a test left running."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**flags: Any) -> subprocess.Popen[bytes]:
        values = {
            "run_name": mongo_uri.rsplit("/", 1)[1].partition("?")[0],
            "db_connection_string": mongo_uri,
            "model_name_or_path": model_dir,
            "mcp_manager_url": tools_url,
            "max_new_tokens": 200,
            "tool_timeout_seconds": FOREVER,
            **flags,
        }
        argv = words_of(values, tmp_path)
        with (tmp_path / f"sampler-{len(started)}.log").open("wb") as log:
            process = subprocess.Popen([sys.executable, "-c", STARTER, *argv], stderr=log)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=PATIENCE)


@pytest.fixture
def engine(model_dir: Path) -> Iterator[ScriptedEngine]:
    def script(prompt: str) -> str:
        return ANSWER if "<tool_response>" in prompt else tool_call("look", key="lamp")

    with serve_script(Renderer.load(model_dir), script) as engine:
        yield engine


@pytest.fixture(autouse=True)
async def heartbeats(store: TrajectoryStore, engine: ScriptedEngine) -> AsyncIterator[None]:
    """Report the engine as alive: beside other work, processes start slower than it counts as gone."""
    async with kept_registered(store, service(engine)):
        yield


def tasks(number: int) -> list[MCPTask]:
    return [
        MCPTask(
            id=f"train/0/q{k}", order=k, num_generations=2, query="?", answer="7", scorer="exact"
        )
        for k in range(number)
    ]


async def wait_for(done: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await done():
            await asyncio.sleep(0.05)


async def every_slot_has_a_turn(store: TrajectoryStore) -> bool:
    return all(bool(record.turns) for record in await records(store))


async def ended(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, PATIENCE)


async def records(store: TrajectoryStore) -> list[Record]:
    return [record async for record in store.records.find()]


async def test_a_killed_samplers_slots_are_played_again_elsewhere(
    store: TrajectoryStore, engine: ScriptedEngine, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    replies = engine.script
    engine.script = lambda prompt: tool_call("slow", seconds=FOREVER)
    await begin_run(store, engine, *tasks(1))
    first = start(lease_seconds=LEASE_SECONDS)

    await wait_for(lambda: every_slot_has_a_turn(store))
    first.kill()
    await ended(first)
    engine.script = replies
    second = start(exit_when_done=True)
    assert await ended(second) == 0
    for record in await records(store):
        assert (record.status, record.attempt) == ("scored", 2)
        assert record.score is not None
        assert record.score.value == 1.0
        lost, final = record.attempts
        assert (lost.ended_by, final.ended_by) == ("expired", "finished")
        assert lost.owner.split(":")[1] == str(first.pid)
        (turn,) = await store.turns.of_record(record.id, attempt=1)
        assert turn.tool_calls[0].name == "slow"
        assert len(await store.turns.of_record(record.id)) == 2
    task = await store.tasks.get("train/0/q0")
    assert task is not None
    assert task.status == "completed"


AGENT = """
import asyncio
from openai import AsyncOpenAI

async def play(task, endpoint):
    messages = [{"role": "user", "content": task.query}]
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        completion = await client.chat.completions.create(model=endpoint.model, messages=messages)
    if completion.choices[0].message.content == "wait":
        await asyncio.Event().wait()
    return completion.choices[0].message.content
"""


@pytest.mark.slow
async def test_the_agents_of_a_killed_sampler_play_again_elsewhere(
    store: TrajectoryStore,
    engine: ScriptedEngine,
    start: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    engine.script = lambda prompt: "wait"
    await begin_run(store, engine, *tasks(1))
    # The tools may well be resumable: of an agent's own state nothing is known.
    flags = {"agent": f"{agent}:play", "resumable_tools": True}
    first = start(**flags, lease_seconds=LEASE_SECONDS)

    await wait_for(lambda: every_slot_has_a_turn(store))
    first.kill()
    await ended(first)
    engine.script = lambda prompt: ANSWER
    second = start(**flags, exit_when_done=True)
    assert await ended(second) == 0
    for record in await records(store):
        assert (record.status, record.attempt, record.outcome) == ("scored", 2, "answered")
        assert record.score is not None
        assert record.score.value == 1.0
        assert [attempt.ended_by for attempt in record.attempts] == ["expired", "finished"]
        (lost,) = await store.turns.of_record(record.id, attempt=1)
        (final,) = await store.turns.of_record(record.id)
        assert (lost.output_text, final.output_text) == ("wait", ANSWER)


@pytest.mark.slow
async def test_a_killed_samplers_rollouts_are_resumed_where_their_tools_keep_no_state(
    store: TrajectoryStore,
    engine: ScriptedEngine,
    start: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    replies = engine.script

    tools_may_answer = tmp_path / "tools_may_answer"

    def look_then_wait(prompt: str) -> str:
        wait = tool_call("slow", seconds=FOREVER, until=str(tools_may_answer))
        return wait if "<tool_response>" in prompt else tool_call("look", key="lamp")

    engine.script = look_then_wait
    await begin_run(store, engine, *tasks(1))
    first = start(lease_seconds=LEASE_SECONDS, resumable_tools=True)

    async def every_slot_has_two_turns() -> bool:
        return all(len(record.turns) == 2 for record in await records(store))

    await wait_for(every_slot_has_two_turns)
    first.kill()
    await ended(first)
    num_asked = len(engine.requests)
    engine.script = replies
    tools_may_answer.touch()
    second = start(resumable_tools=True, exit_when_done=True)
    assert await ended(second) == 0
    assert len(engine.requests) - num_asked == 2, "turns that are durable were sampled again"
    for record in await records(store):
        assert (record.status, record.attempt, record.fence) == ("scored", 1, 2)
        assert [a.ended_by for a in record.attempts] == ["expired", "finished"]
        turns = await store.turns.of_record(record.id)
        assert [turn.id.rsplit("/", 2)[1:] for turn in turns] == [
            ["1", "0"],
            ["1", "1"],
            ["2", "2"],
        ]
        assert [len(turn.tool_results) for turn in turns] == [1, 1, 0]
        prompts = [prompt.tolist() for prompt in rebuild_prompts(turns)]
        assert prompts[-1] in [body["input_ids"] for body in engine.requests]


async def test_sigterm_releases_the_slots_and_a_second_sampler_claims_them_at_once(
    store: TrajectoryStore, engine: ScriptedEngine, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    replies = engine.script
    engine.script = lambda prompt: tool_call("slow", seconds=FOREVER)
    await begin_run(store, engine, *tasks(1))
    first = start()

    await wait_for(lambda: every_slot_has_a_turn(store))
    for _ in range(2):  # as a supervisor does that signals the process and its group
        first.send_signal(signal.SIGTERM)
    assert await ended(first) == 0
    for record in await records(store):
        assert (record.status, record.lease) == ("pending", None)
        assert record.attempts[-1].ended_by == "released"
    engine.script = replies
    assert await ended(start(exit_when_done=True)) == 0
    assert {record.status for record in await records(store)} == {"scored"}
    assert [info.status for info in await store.samplers.all()] == ["stopped", "stopped"]


async def test_a_second_signal_ends_the_sampler_at_once(
    store: TrajectoryStore, engine: ScriptedEngine, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    engine.script = lambda prompt: tool_call("slow", seconds=FOREVER)
    await begin_run(store, engine, *tasks(1))
    process = start(drain_seconds=FOREVER)

    await wait_for(lambda: every_slot_has_a_turn(store))
    process.send_signal(signal.SIGINT)

    async def draining() -> bool:
        return [info.status for info in await store.samplers.all()] == ["draining"]

    await wait_for(draining)
    await asyncio.sleep(SAME_SIGNAL_SECONDS)  # signals closer together count as one
    process.send_signal(signal.SIGINT)
    assert await ended(process) == 130
    assert {record.status for record in await records(store)} == {"running"}


async def test_two_samplers_share_the_slots_without_playing_any_twice(
    store: TrajectoryStore, engine: ScriptedEngine, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    engine.delay_seconds = 0.05
    await begin_run(store, engine, *tasks(10))
    flags = {"exit_when_done": True, "max_concurrent_samples_per_process": 4}
    processes = [start(**flags), start(**flags)]
    assert [await ended(process) for process in processes] == [0, 0]
    played = await records(store)
    assert len(played) == 20
    assert {(record.status, record.attempt) for record in played} == {("scored", 1)}
    assert sum(info.num_finished for info in await store.samplers.all()) == 20


async def test_an_unknown_scorer_ends_a_sampler_before_it_plays_anything(
    store: TrajectoryStore, start: Callable[..., Any], engine: ScriptedEngine, tmp_path: Path
) -> None:
    unknown = tasks(1)[0].model_copy(update={"scorer": "exakt"})
    await begin_run(store, engine, *tasks(2), unknown.model_copy(update={"id": "train/0/x"}))
    assert await ended(start()) == 1
    log = (tmp_path / "sampler-0.log").read_text()
    assert "ConfigError: unknown scorer 'exakt'; did you mean 'exact'?" in log
    assert engine.requests == []
    assert {record.attempt for record in await records(store)} == {0}


def test_a_sampler_starts_without_torch_and_without_reports() -> None:
    program = """
import sys
for name in ("torch", "transformers", "accelerate"):
    sys.modules[name] = None
import agentrl.rollout.worker.sampler_process
import agentrl.rollout, agentrl.datasets.task_stream, agentrl.rewards, agentrl.tools
import agentrl.renderers, agentrl.store, agentrl.inference.client.sglang_client, agentrl.inference.client.pool
assert "agentrl.store.views.reports" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)


async def test_prometheus_sees_what_a_sampler_does(
    store: TrajectoryStore,
    engine: ScriptedEngine,
    start: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    await begin_run(store, engine, *tasks(2))
    port, output = free_port(), tmp_path / "output"
    sampler = start(metrics_port=port, output_dir=output)
    found = await scrape_until(port, output, "agentrl_sampler_slots_total", 4, end="scored")
    assert found[("agentrl_sampler_slots_total", (("end", "failed"),))] == 0
    assert found[("agentrl_sampler_running_rollouts", ())] == 0
    assert found[("agentrl_sampler_servers_up", ())] == 1
    sampled = sum([record.num_output_tokens for record in await records(store)])
    assert found[("agentrl_sampler_output_tokens_total", ())] == sampled
    idle = {"reason": "no_task"}
    await scrape_until(port, output, "agentrl_sampler_waiting_seconds_total", 0.1, **idle)
    sampler.send_signal(signal.SIGTERM)
    assert await ended(sampler) == 0
