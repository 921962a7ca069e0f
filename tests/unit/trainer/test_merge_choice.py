"""`--merge auto` times both ways where a tree saves few tokens, once in a run, and keeps to it."""

import asyncio
import json
import logging
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.training import MakeConfig, Player, train_tasks

from agentrl.config.sections import RootConfig
from agentrl.data import SelectedGroup, StepBatch, build_step
from agentrl.data.rows import Merge
from agentrl.data.tokens import TurnTokens
from agentrl.distributed import Ranks
from agentrl.store import TrajectoryStore
from agentrl.trainer.bootstrap import WorkerGroup
from agentrl.trainer.checkpoint import latest_checkpoint
from agentrl.trainer.merge_choice import MergeChoice, faster_way, timed_sample
from agentrl.trainer.metrics.history import History
from agentrl.trainer.metrics.metrics_file import recorded_steps
from agentrl.trainer.rl.replay import _replay_step
from agentrl.trainer.rl.run_start import learner_settings
from agentrl.trainer.rl.step_groups import RecordImages, image_reader
from agentrl.trainer.rl.training_loop import lead

torch.set_num_threads(1)


def group_of(paths: Sequence[Sequence[int]]) -> SelectedGroup:
    """A group with a record of one turn for each path; its first token is the prompt."""
    turns = []
    for number, path in enumerate(paths):
        count = len(path) - 1
        turns.append(
            TurnTokens(
                turn_id=f"r{number}/0",
                record_id=f"r{number}",
                chain=0,
                full_ids=np.array(path, dtype=np.int32),
                num_prompt_tokens=1,
                behavior_logprobs=np.full(count, -5.0, dtype=np.float32),
                versions=np.zeros(count, dtype=np.int64),
                advantage=1.0 if number % 2 else -1.0,
            )
        )
    return SelectedGroup(
        task_id="t", record_ids=tuple(t.record_id for t in turns), scores=(), turns=tuple(turns)
    )


def fine_tree() -> SelectedGroup:
    """A tree that branches at almost every token: a CPU computes it half as fast as its turns."""
    rng = np.random.default_rng(0)
    return group_of([[1, *rng.integers(0, 2, 12)] for _ in range(128)])


def star() -> SelectedGroup:
    """A long prompt before many short answers."""
    rng = np.random.default_rng(0)
    return group_of([[*range(100), *rng.integers(0, 200, 8)] for _ in range(8)])


def built(group: SelectedGroup, merge: Merge) -> StepBatch:
    return build_step([group], policy_version=0, token_budget=65536, merge=merge)


async def chosen(choice: MergeChoice, group: SelectedGroup) -> tuple[Merge, dict[str, float]]:
    """Return the way of a step with one group, and its seconds by phase."""
    seconds: dict[str, float] = {}
    build = partial(built, group)
    batch = await choice.chosen(build(choice.first), [group], build, seconds)
    return batch.stats.merge, seconds


def learners_of(config: RootConfig) -> WorkerGroup:
    return WorkerGroup(Ranks(), learner_settings(config, None, Ranks().shape))


async def test_a_tree_that_is_slower_than_its_turns_is_computed_unmerged(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config, history = make_config(merge="auto"), History()
    async with learners_of(config) as learners:
        choice = MergeChoice(config.trainer, learners, history)
        with caplog.at_level(logging.INFO, "agentrl.trainer.merge_choice"):
            way, seconds = await chosen(choice, fine_tree())
        assert way == "packed"
        assert seconds.keys() == {"time_merge"}
        (line,) = caplog.messages
        assert line.startswith("merge: merged ")
        assert line.endswith(" s for 1,536 tokens: unmerged")
        assert choice.timed == history.merge_seconds
        # Not timed again, here or where the run is resumed; many saved tokens need no timing.
        resumed = History.model_validate_json(history.model_dump_json())
        for again in (choice, MergeChoice(config.trainer, learners, resumed)):
            assert await chosen(again, fine_tree()) == ("packed", {})
            assert again.timed == {}
            assert await chosen(again, star()) == ("tree", {})


@pytest.mark.parametrize(
    ("flags", "group"),
    [
        ({"merge": "auto"}, star()),
        ({"merge": "auto"}, group_of([[1, 2, 3], [4, 5, 6]])),
        ({"merge": "auto", "max_tokens": 5}, fine_tree()),
        ({"merge": "auto", "full_determinism": "true"}, fine_tree()),
        ({"merge": "tree"}, fine_tree()),
    ],
    ids=["saves much", "shares nothing", "turns beyond the budget", "determinism", "told"],
)
async def test_nothing_is_timed_where_the_way_is_known(
    make_config: MakeConfig, flags: dict[str, str], group: SelectedGroup
) -> None:
    config, history = make_config(**flags), History()
    async with learners_of(config) as learners:
        choice = MergeChoice(config.trainer, learners, history)
        assert (await chosen(choice, group))[0] == "tree"
    assert history.merge_seconds == {}


def test_trees_are_kept_within_the_margin() -> None:
    assert faster_way({"merged": 1.04, "unmerged": 1.0}) == "tree"
    assert faster_way({"merged": 1.06, "unmerged": 1.0}) == "packed"


def test_the_sample_is_no_larger_than_a_pass() -> None:
    groups = [group_of([[1, 2, 3, 4], [1, 2, 5], [1, *range(90)]]), group_of([[6, 7, 8]])]
    sample = timed_sample(groups, 7)
    assert [len(turn.path) for group in sample for turn in group.turns] == [2, 3, 2]
    assert [turn.turn_id for turn in sample[0].turns] == ["r1/0", "r0/0"]


async def play(store: TrajectoryStore, model_path: Path) -> None:
    await store.tasks.add(train_tasks(4, 3))
    await Player(model_path).play_groups(store, [[1.0, 0.0, 0.0]] * 4)


async def test_a_resumed_run_follows_its_first_measurement(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await play(store, model_path)
    await lead(make_config(merge="auto", max_steps="1"), Ranks(), stop=asyncio.Event())
    config = make_config(merge="auto", max_steps="2")
    await lead(config, Ranks(), stop=asyncio.Event())
    first, second = recorded_steps(config, 1, 2).values()
    assert first.merge_seconds.keys() == {"merged", "unmerged"}
    assert second.merge_seconds == {}
    assert first.merge == second.merge == faster_way(first.merge_seconds)
    checkpoint = latest_checkpoint(config.run.output_path)
    assert checkpoint is not None
    assert checkpoint.history.merge_seconds == first.merge_seconds


@pytest.mark.parametrize("way", ["tree", "packed"])
async def test_replay_computes_a_step_as_it_was_computed(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, way: str
) -> None:
    await play(store, model_path)
    await lead(make_config(merge=way, max_steps="1"), Ranks(), stop=asyncio.Event())
    config = make_config(merge="auto", max_steps="1")
    recorded = recorded_steps(config, 1, 1)[1]
    images = RecordImages(store, image_reader(model_path, config.model))
    async with learners_of(config) as learners:
        replayed = await _replay_step(config, store, learners, recorded, images)
    assert replayed.differences == ()
    assert replayed.weights == "equal"


async def test_a_model_that_is_inexact_on_trees_trains_turn_by_turn(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(model_path, tmp_path / "model")
    config_file = model / "config.json"
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    values = json.loads(config_file.read_text()) | {"rope_parameters": rope}
    config_file.write_text(json.dumps(values))
    await play(store, model)
    config = make_config(model_name_or_path=str(model), merge="auto", max_steps="1")
    await lead(config, Ranks(), stop=asyncio.Event())
    (step,) = recorded_steps(config, 1, 1).values()
    assert (step.merge, step.skipped) == ("none", None)
