"""Rollouts of environments that leave others of their group, with real processes and a real store."""

import itertools
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness.scripted_engine import ScriptedEngine, serve_script
from harness.tiny_tokenizer import write_tokenizer
from support.agents import MODEL, client_of, open_stage
from support.branch_play import assert_leaves_its_parent, lose_snapshots, run, turns_of
from support.harbor import write_task
from support.play import begin_run, claim, tool_call

from agentrl.config.sections import DataSection, RolloutSection
from agentrl.datasets.task_stream import train_tasks
from agentrl.plugins.environments.environment_sampler import EnvironmentProcesses
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import AsyncSampler, BranchClosed, RolloutContext
from agentrl.rollout.agent import AgentEndpoint
from agentrl.rollout.recorded_turns import RecordedTurns
from agentrl.rollout.worker.attempt import MakeSampler
from agentrl.rollout.worker.sampling_loop import SamplingLoop
from agentrl.runtime.processes.wall import wall_gap
from agentrl.schema import DispatchedSamplingTask, EnvironmentTask, MCPTask, Record, Score
from agentrl.store import TrajectoryStore

GROUP = "train/0/q0"
LENGTH = 4
"""Moves of a game, and commands of a task."""
PACKAGE = '''
"""A package of games that remember all moves; in one of them, chance has a say."""

import random
import types


class Game:
    def __init__(self, way="steady"):
        self.way = way

    def reset(self, num_players, seed):
        self.moves = []

    def get_observation(self):
        chance = random.random() if self.way == "fickle" and self.moves else 0
        return 0, [(-1, f"Your moves: {self.moves}, your luck: {chance}.", None)]

    def step(self, action):
        self.moves.append(action)
        return len(self.moves) == 4, {}

    def close(self):
        return [len(set(self.moves))], [{"turn_count": len(self.moves), "invalid_move": False}]


def make(env_id, **args):
    return Game(**args)


walk = types.SimpleNamespace(entry_point="textarena:Game", kwargs={})
envs = types.SimpleNamespace(registration=types.SimpleNamespace(ENV_REGISTRY={"Walk-v0": walk}))
'''


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSection:
    """Return settings of an interpreter that finds the package above."""
    (tmp_path / "textarena.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return DataSection(env_python=Path(sys.executable))


def tree(env_id: str, *rounds: int, **args: str) -> EnvironmentTask:
    return EnvironmentTask(
        id=GROUP,
        num_generations=sum(rounds),
        rounds=rounds,
        query="Go on.",
        env_id=env_id,
        args=args,
        row=0,
    )


@dataclass
class Played:
    """A group that a sampler process has played."""

    loop: SamplingLoop
    records: list[Record]
    num_sampled: int


@asynccontextmanager
async def open_sampler(
    store: TrajectoryStore, engine: ScriptedEngine, section: DataSection
) -> AsyncIterator[tuple[RolloutContext, MakeSampler]]:
    """Yield the clients of a sampler process, and what makes its rollouts."""
    rollout = RolloutSection(
        exit_when_done=True, max_turns=LENGTH + 2, max_attempts=1, branch_rule="entropy"
    )
    async with open_stage(store, engine, rollout=rollout) as stage:
        with EnvironmentProcesses.open(section, stage.endpoints) as environments:
            yield replace(stage.context, has_trees=True), environments.sampler


async def play_group(
    store: TrajectoryStore,
    engine: ScriptedEngine,
    section: DataSection,
    task: EnvironmentTask,
    *,
    before_branch: Callable[[], object] = lambda: None,
) -> Played:
    """Play a group in one sampler process."""
    await begin_run(store, engine, task)
    async with open_sampler(store, engine, section) as (context, make):

        def made(task: Any, record: Record, context: RolloutContext) -> AsyncSampler[Any]:
            if record.branch is not None:
                before_branch()
            return make(task, record, context)

        loop = await run(context, made)
    return Played(loop, await store.records.of_task(GROUP), len(engine.requests))


def fresh_moves() -> Callable[[str], str]:
    """Return a policy that never repeats itself, so that a copied move is recognized."""
    numbers = itertools.count()
    return lambda _: f"move {next(numbers)}"


def test_the_tasks_of_an_environment_carry_the_rounds_of_their_groups(section: DataSection) -> None:
    flags = {"env": "textarena:Walk-v0?size=2", "num_generations": 5, "tree_roots": 2}
    for rollouts, rounds in (("tree", (2, 3)), ("chains", ())):
        config = section.model_copy(update={**flags, "rollouts": rollouts})
        tasks = list(train_tasks(config, 0))
        assert [(task.num_generations, task.rounds) for task in tasks] == [(5, rounds)] * 2


async def test_an_environment_is_brought_to_the_branch_by_the_same_replies(
    store: TrajectoryStore, renderer: Renderer, section: DataSection
) -> None:
    with serve_script(renderer, fresh_moves()) as engine:
        played = await play_group(store, engine, section, tree("textarena:Walk-v0", 2, 3))
    assert [one.status for one in played.records] == ["scored"] * 5
    points = [await assert_leaves_its_parent(store, one) for one in played.records[2:]]
    assert played.loop.counts.branched == {"entropy": 3}
    assert played.num_sampled == 2 * LENGTH + sum(LENGTH - point.turn for point in points)
    # The game that a branch went on with knew the parent's moves too.
    assert [one.score.value for one in played.records if one.score] == [LENGTH] * 5
    assert {turn.snapshot for one in played.records for turn in await turns_of(store, one)} == {""}


async def test_an_environment_that_answers_otherwise_closes_the_branch(
    store: TrajectoryStore,
    renderer: Renderer,
    section: DataSection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = tree("textarena:Walk-v0", 1, 2, way="fickle")
    with serve_script(renderer, fresh_moves()) as engine:
        played = await play_group(store, engine, section, task)
    for record in played.records[1:]:
        assert (record.status, record.branch) == ("scored", None)
        assert "the prompt that leads there differs: at token" in record.no_branch
        assert [one.ended_by for one in record.attempts] == ["released", "finished"]
    counts = played.loop.counts
    assert (counts.failed, counts.closed_branches, counts.branched) == (0, 2, {"none": 2})
    assert [one.message.count("its branch is closed") for one in caplog.records].count(1) == 1


def commands(noise: str) -> Callable[[str], str]:
    """Return a policy that appends to a file three times, each time a new word, then answers."""
    numbers = itertools.count()

    def reply(prompt: str) -> str:
        if prompt.count("<tool_response>") == LENGTH - 1:
            return "done"
        return tool_call("bash", command=f"echo {next(numbers)} >> words; cat words; echo {noise}")

    return reply


def appended(turns: list[DispatchedSamplingTask]) -> list[str]:
    """Return the words that a rollout appended."""
    calls = [call for turn in turns for call in turn.tool_calls]
    return [call.arguments["command"].split()[1] for call in calls]


needs_sandbox = pytest.mark.skipif(wall_gap() is not None, reason="no namespaces here")
COUNT_WORDS = """
mkdir -p /logs/verifier
wc -l < /app/words > /logs/verifier/reward.txt
"""


@needs_sandbox
@pytest.mark.parametrize(
    ("noise", "is_kept", "branches"),
    [("$RANDOM$RANDOM", True, True), ("-", False, True), ("$RANDOM$RANDOM", False, False)],
    ids=["restored", "repeated", "closed"],
)
async def test_a_sandbox_is_restored_from_its_snapshot_or_by_the_same_commands(
    store: TrajectoryStore,
    renderer: Renderer,
    mongo_uri: str,
    tmp_path: Path,
    *,
    noise: str,
    is_kept: bool,
    branches: bool,
) -> None:
    folder = write_task(tmp_path / "task", test=COUNT_WORDS)
    task = tree(f"harbor:{folder}", 1, 2, runtime="process")
    loses = partial(lose_snapshots, mongo_uri)
    with serve_script(renderer, commands(noise)) as engine:
        played = await play_group(
            store, engine, DataSection(), task, before_branch=bool if is_kept else loses
        )
    for record in played.records:
        words = appended(turns := await turns_of(store, record))
        assert (record.status, len(words)) == ("scored", LENGTH - 1)
        assert record.score is not None
        assert record.score.value == LENGTH - 1
        assert turns[-2].tool_results[0].content.split()[: LENGTH - 1] == words
    for record in played.records[1:]:
        if branches:
            await assert_leaves_its_parent(store, record)
        else:
            assert "the prompt that leads there differs" in record.no_branch
    root = await turns_of(store, played.records[0])
    # Nothing leaves a rollout before its first turn.
    assert [bool(turn.snapshot) for turn in root] == [False, *[True] * (LENGTH - 1)]


@needs_sandbox
async def test_a_snapshot_outlives_the_process_of_the_parent(
    store: TrajectoryStore, renderer: Renderer, tmp_path: Path
) -> None:
    folder = write_task(tmp_path / "task", test=COUNT_WORDS)
    task = tree(f"harbor:{folder}", 1, 1, runtime="process")
    with serve_script(renderer, commands("$RANDOM$RANDOM")) as engine:
        await begin_run(store, engine, task)
        async with open_sampler(store, engine, DataSection()) as (context, make):
            record, _ = await claim(store)
            sampler = make(task, record, context)
            result = await sampler.run()
            await sampler.finish()
            score = await sampler.evaluate_record(result)
        assert isinstance(score, Score)
        await store.records.finish(
            record.id, record.fence, outcome="answered", final_answer="done", lease_seconds=30
        )
        await store.scores.set(record.id, record.fence, score)
        async with open_sampler(store, engine, DataSection()) as (context, make):
            await run(context, make)
    _, branch = await store.records.of_task(GROUP)
    await assert_leaves_its_parent(store, branch)
    assert branch.score is not None
    assert branch.score.value == score.value == LENGTH - 1


async def test_a_branch_of_several_agents_is_closed(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    async def ask_both(_: MCPTask, endpoint: AgentEndpoint) -> str:
        said = ""
        async with client_of(endpoint) as client:
            for seat in ("left", "right"):
                reply = await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": f"You play {seat}."}],
                    extra_headers={"X-AgentRL-Seat": seat},
                )
                said = str(reply.choices[0].message.content)
        return said

    task = MCPTask(id=GROUP, num_generations=2, query="Play.", answer="0")
    with serve_script(renderer, fresh_moves()) as engine:
        await begin_run(store, engine, task)
        async with open_stage(store, engine) as stage:
            parent, _ = await stage.sampler(ask_both)
            await parent.run()
            await parent.finish()
            branch, _ = await stage.sampler(ask_both)
            branch.play_first(RecordedTurns.before_branch(parent.turns, 1, replays_calls=True))
            with pytest.raises(BranchClosed, match="the rollout has several agents"):
                await branch.run()
            await branch.discard()
