"""Rollouts that leave others of their group: from the claim to the score, with real tools."""

import itertools
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from harness.processes import engine_process, listening_process
from harness.scripted_engine import serve_script
from support.branch_play import assert_leaves_its_parent, lose_snapshots, run, turns_of
from support.engines import make_model
from support.play import ExactScoring, begin_run, claim, open_play, tool_call

from agentrl.config.sections import RolloutSection, SamplingSection
from agentrl.renderers.conversation import Conversation
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import (
    AsyncSampler,
    BranchClosed,
    MCPSampler,
    RolloutContext,
    RolloutResult,
)
from agentrl.rollout.worker.attempt import MakeSampler
from agentrl.rollout.worker.branching import with_branch
from agentrl.schema import DispatchedSamplingTask, MCPTask, Record, rebuild_prompts
from agentrl.store import TrajectoryStore

COUNTING_SERVER = Path(__file__).parents[3] / "support/counting_server.py"
FOLDER_SERVER = COUNTING_SERVER.with_name("folder_server.py")
GROUP = "train/0/q0"
LENGTH = 4
"""Turns of every rollout: three steps, then the answer."""


def tree(*rounds: int) -> MCPTask:
    return MCPTask(
        id=GROUP,
        num_generations=sum(rounds),
        rounds=rounds,
        query="How many steps are three steps?",
        answer="step 3",
    )


def three_steps(prompt: str, tool: str = "advance") -> str:
    """Call the tool three times, then answer with its last result."""
    results = prompt.split("<tool_response>")[1:]
    if len(results) < LENGTH - 1:
        return tool_call(tool)
    return f"<answer>{results[-1].partition('</tool_response>')[0].strip()}</answer>"


def three_common_steps(prompt: str) -> str:
    """Do the same with the tool that everybody advances."""
    return three_steps(prompt, "advance_all")


@pytest.fixture(scope="module")
def steps_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("counting") / "steps"
    path.touch()
    return path


@pytest.fixture(scope="module")
def counting(steps_file: Path) -> Iterator[dict[str, Any]]:
    """A server of which every rollout has its own session."""
    with listening_process([sys.executable, COUNTING_SERVER, steps_file, "{port}"]) as url:
        yield {"mcpServers": {"counting": {"url": f"{url}/mcp", "per_rollout": True}}}


def settings(**fields: Any) -> RolloutSection:
    values = {"exit_when_done": True, "max_turns": 6, "max_attempts": 1, "branch_rule": "entropy"}
    return RolloutSection(**{**values, **fields})


async def test_branches_of_tools_without_state_continue_where_others_were(
    store: TrajectoryStore, renderer: Renderer, counting: dict[str, Any], steps_file: Path
) -> None:
    before = steps_file.stat().st_size
    with serve_script(renderer, three_common_steps) as engine:
        await begin_run(store, engine, tree(2, 3, 1))
        async with open_play(store, engine, counting, rollout=settings()) as context:
            loop = await run(replace(context, resumable=True))
    records = await store.records.of_task(GROUP)
    assert [(one.round, one.status, one.attempt) for one in records] == [
        (number, "scored", 1) for number in (0, 0, 1, 1, 1, 2)
    ]
    points = [await assert_leaves_its_parent(store, one) for one in records[2:]]
    assert len({(point.record_id, point.turn) for point in points[:3]}) == 3
    assert loop.counts.branched == {"entropy": 4}
    # Nothing before a branch was sampled or called again.
    num_sampled = 2 * LENGTH + sum(LENGTH - point.turn for point in points)
    assert len(engine.requests) == num_sampled
    assert steps_file.stat().st_size - before == num_sampled - len(records)
    (group,) = await store.ledger.ready_groups("trainer", split="train", limit=1, step=1)
    assert [data.branch for data in group] == [None, None, *points]


async def test_tools_that_keep_state_are_brought_to_the_branch_by_the_same_calls(
    store: TrajectoryStore, renderer: Renderer, counting: dict[str, Any]
) -> None:
    with serve_script(renderer, three_steps) as engine:
        await begin_run(store, engine, tree(2, 3))
        async with open_play(store, engine, counting, rollout=settings()) as context:
            await run(context)
    records = await store.records.of_task(GROUP)
    for record in records[2:]:
        await assert_leaves_its_parent(store, record)
    # A branch whose tools had begun anew would have answered with an earlier step.
    assert [one.final_answer for one in records] == ["step 3"] * 5
    assert [one.score.value for one in records if one.score is not None] == [1.0] * 5


async def test_a_branch_whose_tools_answer_otherwise_is_closed_and_played_from_the_question(
    store: TrajectoryStore,
    renderer: Renderer,
    counting: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serve_script(renderer, three_common_steps) as engine:
        await begin_run(store, engine, tree(1, 2))
        async with open_play(store, engine, counting, rollout=settings()) as context:
            loop = await run(context)
    root, *others = await store.records.of_task(GROUP)
    assert (root.round, root.no_branch) == (0, "")
    for record in others:
        assert (record.status, record.branch) == ("scored", None)
        assert record.no_branch.startswith(
            "turn 0 called advance_all again, and the result differs: "
        )
        assert [one.ended_by for one in record.attempts] == ["released", "finished"]
        turns = await turns_of(store, record)
        assert [turn.index for turn in turns] == list(range(LENGTH))
        assert {turn.attempt for turn in turns} == {2}
    assert (loop.counts.failed, loop.counts.closed_branches) == (0, 2)
    assert loop.counts.branched == {"none": 2}
    warnings = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert [warning.count("its branch is closed") for warning in warnings] == [1]


@pytest.mark.parametrize(
    ("noise", "is_kept", "branches"),
    [("noisy", True, True), ("quiet", False, True), ("noisy", False, False)],
    ids=["restored", "repeated", "closed"],
)
async def test_a_folder_is_restored_from_its_copy_or_by_the_same_calls(
    store: TrajectoryStore,
    renderer: Renderer,
    mongo_uri: str,
    *,
    noise: str,
    is_kept: bool,
    branches: bool,
) -> None:
    command = [str(FOLDER_SERVER), "${rollout_dir}", noise]
    server = {"command": sys.executable, "args": command, "per_rollout": True, "state": "folder"}
    with serve_script(renderer, three_steps) as engine:

        def made(task: Any, record: Record, context: RolloutContext) -> MCPSampler:
            if record.branch is not None and not is_kept:
                lose_snapshots(mongo_uri)
            return MCPSampler(task, record, context)

        await begin_run(store, engine, tree(2, 2))
        tools = {"mcpServers": {"folder": server}}
        async with open_play(store, engine, tools, rollout=settings()) as context:
            loop = await run(replace(context, has_trees=True), made)
    records = await store.records.of_task(GROUP)
    assert [(one.status, str(one.final_answer)[:6]) for one in records] == [
        ("scored", "step 3")
    ] * 4
    assert loop.counts.closed_branches == (0 if branches else 2)
    for record in records[2:]:
        if branches:
            await assert_leaves_its_parent(store, record)
        else:
            assert record.no_branch.startswith("turn 0 called advance again, and the result")


async def dead_branch(
    store: TrajectoryStore, context: RolloutContext, num_turns: int
) -> tuple[Record, list[DispatchedSamplingTask]]:
    """Claim the branch slot, store so many of its turns, and die."""
    claimed = await store.records.claim(
        "dead", lease_seconds=30, admitted_groups=9, max_attempts=3, resumable=True
    )
    assert claimed is not None
    record = await with_branch(context, claimed[0])
    assert record.branch is not None
    parents = await store.turns.of_record(record.branch.record_id)
    for index, turn in enumerate(parents[:num_turns]):
        own: dict[str, Any] = {
            "id": f"{record.id}/{record.fence}/{index}",
            "record_id": record.id,
            "attempt": 1,
        }
        if index >= record.branch.turn:  # sampled, and by chance the same
            own["sampling_params"] = turn.sampling_params.model_copy(update={"seed": 1})
        await store.turns.append(turn.model_copy(update=own), record.fence)
    await store.database["records"].update_one(
        {"_id": record.id}, [{"$set": {"lease.expires_at": {"$subtract": ["$$NOW", 1]}}}]
    )
    store._db.leases.forget(record.id)
    return record, parents


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
async def test_a_branch_is_resumed_before_at_and_behind_its_turn(
    store: TrajectoryStore,
    renderer: Renderer,
    counting: dict[str, Any],
    tmp_path: Path,
    num_turns: int,
) -> None:
    file = tmp_path / "rules.py"
    file.write_text("def second(group):\n    return group.records[0].id, 2\n")
    rollout = settings(branch_rule=f"{file}:second")
    with serve_script(renderer, three_steps) as engine:
        await begin_run(store, engine, tree(1, 1))
        async with open_play(store, engine, counting, rollout=rollout) as context:
            context = replace(context, resumable=True)
            record, task = await claim(store)
            sampler = MCPSampler(task, record, context)
            await sampler.run()
            await sampler.finish()
            await store.records.finish(
                record.id, record.fence, outcome="answered", final_answer="3", lease_seconds=30
            )
            await store.scores.set(
                record.id, record.fence, await ExactScoring().score(task, "step 3")
            )
            branch, parents = await dead_branch(store, context, num_turns)
            await store.groups.reap(3, lease_seconds=30)
            engine.requests.clear()
            loop = await run(context)
    (_, done) = await store.records.of_task(GROUP)
    assert (done.status, done.branch) == ("scored", branch.branch)
    await assert_leaves_its_parent(store, done)
    # An attempt without a turn has nothing to resume.
    assert (done.attempt, loop.counts.resumed) == ((1, 1) if num_turns else (2, 0))
    turns = await turns_of(store, done)
    assert [turn.id.split("/")[-2] for turn in turns] == [
        *["1"] * num_turns,
        *["2"] * (LENGTH - num_turns),
    ]
    assert len(engine.requests) == LENGTH - max(2, num_turns)
    assert [len(turn.output_ids) for turn in turns] == [len(turn.output_ids) for turn in parents]


async def test_a_rule_that_fails_is_a_failed_attempt(
    store: TrajectoryStore, renderer: Renderer, counting: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "rules.py"
    file.write_text("def broken(group):\n    return group.nothing\n")
    rollout = settings(branch_rule=f"{file}:broken", max_attempts=2)
    with serve_script(renderer, three_steps) as engine:
        await begin_run(store, engine, tree(1, 1))
        async with open_play(store, engine, counting, rollout=rollout) as context:
            await run(context)
    root, branch = await store.records.of_task(GROUP)
    assert (root.status, branch.status, branch.attempt) == ("scored", "failed", 2)
    assert "rules.py:2" in str(branch.error)
    (task,) = await store.tasks.get_many([GROUP])
    assert task.status == "completed"


async def test_a_group_without_a_parent_plays_chains(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    with serve_script(renderer, lambda _: "<answer>step 3</answer>") as engine:
        await begin_run(store, engine, tree(1, 2))
        async with open_play(store, engine, None, rollout=settings()) as context:
            loop = await run(context)
    records = await store.records.of_task(GROUP)
    assert [one.no_branch for one in records] == [
        "",
        *["entropy: no rollout has a second turn"] * 2,
    ]
    assert loop.counts.branched == {"none": 2}


async def test_a_rule_sees_the_rounds_before_its_own(
    store: TrajectoryStore, renderer: Renderer, tmp_path: Path
) -> None:
    file = tmp_path / "rules.py"
    file.write_text("def roots(group):\n    assert [one.round for one in group.records] == [0]\n")
    rollout = settings(branch_rule=f"{file}:roots")
    with serve_script(renderer, lambda _: "<answer>step 3</answer>") as engine:
        await begin_run(store, engine, tree(1, 2))
        async with open_play(store, engine, None, rollout=rollout) as context:
            await run(context)
    (_, *branches) = await store.records.of_task(GROUP)
    assert [one.no_branch for one in branches] == [f"{file}:roots: it chose the question"] * 2


WORLDS = itertools.count()


class Walk(AsyncSampler[MCPTask]):
    """Walks through a world of its own, of which it has snapshots."""

    can_branch: ClassVar[bool] = True
    world: str = ""

    async def run(self) -> RolloutResult:
        point, self.world = self.record.branch, f"world {next(WORLDS)}"
        conversation = Conversation([{"role": "user", "content": self.task.query}])
        for index in range(LENGTH):
            if point is not None and index == point.turn:
                if self.restored is None:
                    raise BranchClosed("its snapshot is gone")
                self.world = self.restored.decode()
            await self.generate(conversation)
            self.world += "+"
            conversation.add({"role": "user", "content": f"You are in {self.world}. Go on."})
        return RolloutResult("answered", self.world)

    async def snapshot(self) -> bytes:
        return self.world.encode()

    async def evaluate_record(self, result: RolloutResult) -> float:
        return 1.0


class Wander(Walk):
    """Does the same and promises nothing."""

    can_branch: ClassVar[bool] = False


async def walked(
    store: TrajectoryStore, renderer: Renderer, make: MakeSampler, lost_from: str = ""
) -> list[Record]:
    with serve_script(renderer, lambda _: "on") as engine:
        await begin_run(store, engine, tree(1, 1))
        async with open_play(store, engine, None, rollout=settings()) as context:

            def made(task: Any, record: Record, context: RolloutContext) -> AsyncSampler[Any]:
                if record.branch is not None and lost_from:
                    lose_snapshots(lost_from)
                return make(task, record, context)

            await run(replace(context, has_trees=True), made)
    return await store.records.of_task(GROUP)


async def test_an_environment_with_snapshots_restores_that_of_the_branch(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    root, branch = await walked(store, renderer, Walk)
    await assert_leaves_its_parent(store, branch)
    assert branch.final_answer == root.final_answer
    assert [bool(turn.snapshot) for turn in await turns_of(store, root)] == [
        False,
        *[True] * (LENGTH - 1),
    ]


async def test_a_snapshot_that_is_gone_closes_the_branch(
    store: TrajectoryStore, renderer: Renderer, mongo_uri: str
) -> None:
    root, branch = await walked(store, renderer, Walk, mongo_uri)
    assert (branch.status, branch.no_branch) == ("scored", "its snapshot is gone")
    assert branch.final_answer != root.final_answer


async def test_a_sampler_that_promises_nothing_is_refused_by_name(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    _, branch = await walked(store, renderer, Wander)
    assert branch.status == "failed"
    assert "Wander cannot start at a turn of another rollout" in str(branch.error)


class Talk(AsyncSampler[MCPTask]):
    """Says something in every turn."""

    async def run(self) -> RolloutResult:
        conversation = Conversation([{"role": "user", "content": "word " * 60}])
        for _ in range(LENGTH):
            await self.generate(conversation)
            conversation.add({"role": "user", "content": "Go on, and say a little more."})
        return RolloutResult("answered", "")

    async def evaluate_record(self, result: RolloutResult) -> float:
        return 1.0


@dataclass(frozen=True)
class Served:
    """The embedded engine, in a process of its own."""

    base_url: str
    renderer: Renderer


async def test_a_branch_finds_its_prefix_in_the_cache_of_the_engine(
    store: TrajectoryStore, renderer: Renderer, tmp_path: Path
) -> None:
    with engine_process(make_model(tmp_path / "model", seed=1)) as url:
        engine = Served(url, renderer)
        await begin_run(store, engine, tree(2, 6))
        sampling = SamplingSection(max_new_tokens=12)
        async with open_play(store, engine, None, rollout=settings(), sampling=sampling) as context:
            await run(replace(context, resumable=True), Talk)
    num_prefix = num_computed = 0
    for record in (await store.records.of_task(GROUP))[2:]:
        point = await assert_leaves_its_parent(store, record)
        turns = await turns_of(store, record)
        prompt = rebuild_prompts(turns)[point.turn]
        num_prefix += len(prompt)
        num_computed += len(prompt) - turns[point.turn].cached_tokens
    assert num_prefix > 1000
    assert num_computed < 0.05 * num_prefix
