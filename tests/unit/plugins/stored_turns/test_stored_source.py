"""Turns of an ended run as tasks: chosen where scores part, played from there, trained from there."""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.processes import listening_process
from harness.scripted_engine import serve_script
from harness.tiny_tokenizer import write_tokenizer
from support.branch_play import run, turns_of
from support.play import begin_run, claim, open_play, tool_call

from agentrl.config.loading import load_config
from agentrl.config.sections import AlgorithmSection, DataSection, RolloutSection
from agentrl.data import select_group
from agentrl.datasets.task_stream import eval_tasks, train_tasks
from agentrl.errors import ConfigError
from agentrl.launcher.cluster.gpu_placement import GpuMap
from agentrl.plugins.stored_turns.stored_source import check_start
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import MCPSampler
from agentrl.rollout.worker.branching import stored_turns
from agentrl.schema import MCPTask, rebuild_prompts
from agentrl.schema.stored_start import StoredStart
from agentrl.store import TrajectoryStore

COUNTING_SERVER = Path(__file__).parents[3] / "support/counting_server.py"
QUESTION = "How many steps are three steps?"
LENGTH = 4
"""Turns of every rollout: three steps, then the answer."""


class ThreeSteps:
    """Calls the tool three times, then answers rightly every second time."""

    def __init__(self, tool: str = "advance") -> None:
        self._tool = tool
        self._answers = itertools.cycle(["step 3", "step 4"])

    def __call__(self, prompt: str) -> str:
        if prompt.count("<tool_response>") < LENGTH - 1:
            return tool_call(self._tool)
        return f"<answer>{next(self._answers)}</answer>"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A server of which every rollout has its own session, which counts its steps."""
    path = tmp_path_factory.mktemp("counting") / "steps"
    path.touch()
    with listening_process([sys.executable, COUNTING_SERVER, path, "{port}"]) as url:
        yield {"mcpServers": {"counting": {"url": f"{url}/mcp", "per_rollout": True}}}


def settings() -> RolloutSection:
    return RolloutSection(exit_when_done=True, max_turns=6, max_attempts=1)


def question(number: int = 0, generations: int = 4) -> MCPTask:
    return MCPTask(
        id=f"train/0/q{number}",
        order=number,
        num_generations=generations,
        query=QUESTION,
        answer="step 3",
        dataset_id=f"q{number}",
        tags=("short",),
    )


@pytest.fixture
async def origin(
    store: TrajectoryStore,
    renderer: Renderer,
    counting: dict[str, Any],
    tmp_path: Path,
    mongo_uri: str,
) -> Path:
    """The output directory of an ended run, whose attempts part where they answer."""
    with serve_script(renderer, ThreeSteps()) as engine:
        await begin_run(store, engine, question())
        async with open_play(store, engine, counting, rollout=settings()) as context:
            await run(context)
    await store.runs.set_status("completed")
    return written(tmp_path / "earlier", mongo_uri, store.database_name)


def written(folder: Path, uri: str, name: str) -> Path:
    folder.mkdir()
    flags = {"run_name": name, "db_connection_string": uri}
    (folder / "config.yaml").write_text(yaml.safe_dump(flags))
    return folder


@pytest.fixture
async def later(mongo_uri: str) -> AsyncIterator[TrajectoryStore]:
    """The store of the run that continues."""
    async with TrajectoryStore.connect(mongo_uri, "later_run") as store:
        await store.drop_database()
        await store.ensure_schema()
        yield store
        await store.drop_database()


async def stored(folder: Path, parameters: str = "", **flags: Any) -> list[MCPTask]:
    data = DataSection(env=f"stored:{folder}{parameters}", num_generations=2, **flags)
    return await asyncio.to_thread(lambda: list(train_tasks(data, 0)))


async def test_rollouts_start_where_scores_part_and_train_what_they_sample_there(
    store: TrajectoryStore,
    later: TrajectoryStore,
    origin: Path,
    renderer: Renderer,
    counting: dict[str, Any],
) -> None:
    (task,) = await stored(origin)
    assert (task.id, task.query, task.tags) == ("train/0/stored-q0", QUESTION, ("short",))
    assert task.start is not None
    assert (task.start.turn, task.start.share_right) == (LENGTH - 1, 0.5)
    earlier = await store.turns.of_record(task.start.record_id)
    shown = task.start.model_dump(mode="json")  # on pages and in `agentrl inspect`
    assert (shown["run"], shown["turns"]) == (store.database_name, [one.id for one in earlier])
    with serve_script(renderer, ThreeSteps(), version=7) as engine:
        await begin_run(later, engine, task)
        # The database is all that the samplers read.
        async with open_play(later, engine, counting, rollout=settings()) as context:
            loop = await run(context)
    wanted = rebuild_prompts(earlier)[LENGTH - 1]
    assert [request["input_ids"] for request in engine.requests] == [wanted.tolist()] * 2
    records = await later.records.of_task(task.id)
    assert [one.final_answer for one in records] == ["step 3", "step 4"]
    num_sampled = 0
    for record in records:
        assert (record.branch, record.min_version, record.max_version) == (None, 7, 7)
        turns = await turns_of(later, record)
        assert [turn.trainable for turn in turns] == [False] * (LENGTH - 1) + [True]
        assert {turn.model for turn in turns[:-1]} == {f"{store.database_name}@0"}
        for own, theirs in zip(turns[:-1], earlier, strict=False):
            assert own.output_ids.tobytes() == theirs.output_ids.tobytes()
            assert own.tool_results == theirs.tool_results
        num_sampled += len(turns[-1].output_ids)
    assert loop.counts.num_output_tokens == num_sampled
    (group,) = await later.ledger.ready_groups("trainer", split="train", limit=1, step=8)
    selected = select_group(group, AlgorithmSection(), policy_version=7)
    assert [turn.turn_id for turn in selected.turns] == [one.turns[-1] for one in records]
    assert [turn.num_prompt_tokens for turn in selected.turns] == [len(wanted)] * 2


async def test_every_epoch_goes_one_state_back_until_it_asks_the_question(origin: Path) -> None:
    tasks = await stored(origin, num_train_epochs=5)
    assert [task.id for task in tasks] == [f"train/{epoch}/stored-q0" for epoch in range(5)]
    assert [task.start and task.start.turn for task in tasks] == [3, 2, 1, None, None]


async def test_a_rollout_whose_sampler_dies_goes_on_behind_the_same_prompt(
    later: TrajectoryStore, origin: Path, renderer: Renderer, counting: dict[str, Any]
) -> None:
    (task,) = await stored(origin)
    with serve_script(renderer, ThreeSteps()) as engine:
        await begin_run(later, engine, task)
        async with open_play(later, engine, counting, rollout=settings()) as opened:
            context = replace(opened, resumable=True)
            record, claimed = await claim(later)
            assert claimed.start is not None
            first = MCPSampler(claimed, record, context)
            first.play_first(stored_turns(context, first, claimed.start, ()))
            await first.run()
            await first.finish()
            # Killed before the result was stored: another process finds all turns but no outcome.
            found = await later.turns.of_record(record.id)
            second = MCPSampler(claimed, record, context)
            second.play_first(stored_turns(context, second, claimed.start, found[:2]))
            resumed = await second.run()
            third = MCPSampler(claimed, record, context)
            third.play_first(stored_turns(context, third, claimed.start, found))
            assert (await third.run()).final_answer == "step 3"
    assert resumed.final_answer == "step 4"
    first_prompt, second_prompt = (request["input_ids"] for request in engine.requests)
    assert first_prompt == second_prompt


async def test_tools_that_answer_otherwise_fail_the_attempt_by_name(
    store: TrajectoryStore,
    later: TrajectoryStore,
    renderer: Renderer,
    counting: dict[str, Any],
    tmp_path: Path,
    mongo_uri: str,
) -> None:
    # Everybody advances this counter, so no rollout finds it where another one did.
    common = ThreeSteps("advance_all")
    with serve_script(renderer, common) as engine:
        await begin_run(store, engine, question(generations=1))
        async with open_play(store, engine, counting, rollout=settings()) as context:
            await run(context)
    await store.runs.set_status("completed")
    (record,) = await store.records.of_task("train/0/q0")
    turns = tuple(await turns_of(store, record))
    start = StoredStart(run="earlier", record_id=record.id, share_right=0.5, turns=turns)
    task = question(generations=2).again("train/0/stored-q0", start=start)
    with serve_script(renderer, common) as engine:
        await begin_run(later, engine, task)
        async with open_play(later, engine, counting, rollout=settings()) as context:
            await run(context)
    assert engine.requests == []
    for one in await later.records.of_task(task.id):
        assert (one.status, one.branch) == ("failed", None)
        assert one.error is not None
        assert "turn 0 called advance_all again, and the result differs" in one.error


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("?where=score+%3E+2", "no group of 0 scored records has right and wrong attempts"),
        ("?where=score+%3E+0.5", "no group of 2 scored records has right and wrong attempts"),
        ("?where=scores+%3E+2", "records have no field 'scores'"),
        ("?solved=2-3", "solved is two shares of 1, such as 0.2-0.8"),
        ("?solved=0.8-0.2", "solved is two shares of 1"),
        ("?size=3", r"write stored:RUN, or stored:RUN\?where=CONDITION"),
    ],
)
async def test_mistakes_are_refused_in_one_line(
    origin: Path, parameters: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await stored(origin, parameters)


def test_tools_whose_state_cannot_be_restored_are_refused_by_name(tmp_path: Path) -> None:
    servers = {"mcpServers": {"shop": {"url": "http://127.0.0.1:9/mcp"}}}
    config = load_config({"env": "stored:earlier", "mcp_servers": json.dumps(servers)})
    with pytest.raises(ConfigError, match="--env stored:earlier: tool server 'shop' declares"):
        check_start(config, GpuMap(), tmp_path)


async def test_an_evaluation_is_of_whole_questions(origin: Path) -> None:
    data = DataSection(eval_env=f"stored:{origin}")
    with pytest.raises(ConfigError, match=r"--eval_env .* evaluations ask whole questions"):
        await asyncio.to_thread(eval_tasks, data, 0)


async def test_a_run_that_goes_on_and_one_that_is_none_are_refused(
    store: TrajectoryStore, origin: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no run .*elsewhere.* here"):
        await stored(tmp_path / "elsewhere")
    await store.runs.set_status("training")
    assert await stored(origin)  # interrupted: nobody goes on with it
    await store.trainer_leases.acquire("trainer", "elsewhere:1:0-a", 60)
    with pytest.raises(ConfigError, match="the run goes on, and its records with it"):
        await stored(origin)


async def test_tasks_of_another_kind_are_refused_by_name(
    store: TrajectoryStore, origin: Path
) -> None:
    await store.database.tasks.update_one({"_id": "train/0/q0"}, {"$set": {"kind": "task"}})
    with pytest.raises(ConfigError, match="train/0/q0 is of kind 'task', whose state"):
        await stored(origin)
