"""Rollouts against a tool server that fails at random."""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from harness.processes import listening_process
from harness.scripted_engine import ScriptedEngine, serve_script
from harness.tiny_tokenizer import write_tokenizer
from support import chaos_server
from support.play import ExactScoring, begin_run, service, tool_call

from agentrl.config.sections import RolloutSection, SamplingSection
from agentrl.inference import ServerPool
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import MCPSampler, RolloutContext
from agentrl.rollout.worker import admission_limits
from agentrl.rollout.worker.sampling_loop import LoopTimes, SamplingLoop
from agentrl.schema import MCPTask, Outcome, Record, rebuild_prompts
from agentrl.store import TrajectoryStore
from agentrl.tools import ToolsConfig, connect_tools, load_mcp_servers

LOOKS = 2
TIMES = LoopTimes(busy_refresh=0.2, idle_poll=0.05, report=1.0, scoring=0.2)


@pytest.fixture
def chaos_url() -> Iterator[str]:
    with listening_process([sys.executable, chaos_server.__file__, "{port}", "7"]) as url:
        yield f"{url}/mcp"


def look_twice(prompt: str) -> str:
    looks = prompt.count("<|im_start|>assistant\n<tool_call>")
    return tool_call("look", key="lamp") if looks < LOOKS else "<answer>7</answer>"


async def soak(
    store: TrajectoryStore, url: str, engine: ScriptedEngine, num_rollouts: int, seconds: float
) -> list[Record]:
    """Play rollouts until every record is at its end; return the records."""
    await begin_run(
        store,
        engine,
        *(
            MCPTask(id=f"train/0/q{n}", order=n, num_generations=4, query="What?", answer="7")
            for n in range(num_rollouts // 4)
        ),
    )
    rollout = RolloutSection(
        max_turns=6, max_concurrent_samples_per_process=16, max_attempts=60, exit_when_done=True
    )
    tools = ToolsConfig(servers=load_mcp_servers(url), max_retries=0, call_timeout_seconds=1.0)
    async with connect_tools(tools) as toolbox, ServerPool() as servers:
        context = RolloutContext(
            store=store,
            servers=servers,
            renderer=engine.renderer,
            toolbox=toolbox,
            scoring=ExactScoring(),
            rollout=rollout,
            sampling=SamplingSection(max_new_tokens=200, max_prompt_tokens=1_000_000),
        )
        loop = SamplingLoop(context, "soak", MCPSampler, times=TIMES)
        beats = asyncio.create_task(keep_registered(store, engine))
        try:
            async with asyncio.timeout(seconds):
                await loop.run(asyncio.Event(), asyncio.Event())
        finally:
            beats.cancel()
            await asyncio.wait([beats])
    return [record async for record in store.records.find()]


async def keep_registered(store: TrajectoryStore, engine: ScriptedEngine) -> None:
    while True:
        await asyncio.sleep(5)
        await store.services.register(service(engine))


async def check(store: TrajectoryStore, records: list[Record], renderer: Renderer) -> Counter[str]:
    """Assert what has to hold of every record; return how often each kind of result was read."""
    read: Counter[str] = Counter()
    stop = renderer.stop_token_ids[0]
    for record in records:
        assert record.status == "scored", record
        assert record.outcome in get_args(Outcome)
        assert record.score is not None
        # The script always ends with the right answer: whatever else is scored would be a failure
        # of the infrastructure in disguise.
        assert (record.outcome, record.score.value) == ("answered", 1.0)
        assert {attempt.ended_by for attempt in record.attempts[:-1]} <= {"error"}
        for attempt in record.attempts[:-1]:
            assert str(attempt.error).startswith("ToolError: "), attempt
        turns = await store.turns.of_record(record.id)
        for index, prompt in enumerate(rebuild_prompts(turns)):
            # The question, and a reply and a result a turn: nobody else closes anything.
            assert int((prompt == stop).sum()) == 2 + 2 * index
        for turn in turns[:-1]:
            (result,) = turn.tool_results
            assert chaos_server.GARBAGE not in result.content
            read[kind_of(result.content)] += 1
    return read


def kind_of(content: str) -> str:
    if content in ("7", chaos_server.MARKUP, "the shelf is empty"):
        return {"7": "fine", chaos_server.MARKUP: "markup"}.get(content, "own_error")
    return "huge" if content.startswith("word ") else "slow"


@pytest.mark.parametrize(
    ("num_rollouts", "seconds"),
    [
        pytest.param(60, 80.0, id="short"),
        pytest.param(
            2000, 1700.0, marks=[pytest.mark.slow, pytest.mark.timeout(1800)], id="2000 rollouts"
        ),
    ],
)
async def test_rollouts_end_in_a_named_outcome_whatever_the_tools_do(
    store: TrajectoryStore,
    chaos_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_rollouts: int,
    seconds: float,
) -> None:
    # Failures are the rule here, and say nothing about whether to go on.
    monkeypatch.setattr(admission_limits, "MAX_FAILURES_IN_A_ROW", 1000)
    renderer = Renderer.load(write_tokenizer(tmp_path / "model"))
    with serve_script(renderer, look_twice) as engine:
        records = await soak(store, chaos_url, engine, num_rollouts, seconds)
        assert len(records) == num_rollouts
        read = await check(store, records, renderer)
    failed_attempts = sum(len(record.attempts) - 1 for record in records)
    assert failed_attempts > 0
    assert set(read) == {"fine", *chaos_server.ODD}
