"""`--merge auto`: trees for families that are proven exact on them, where they save enough."""

import asyncio
import json
import logging
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from harness.tiny_families import tiny_config
from support.training import MakeConfig, Player, train_tasks
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from agentrl.config.sections import ModelSection, TrainerSection
from agentrl.data import SelectedGroup, build_step
from agentrl.data.rows import Merge
from agentrl.data.tokens import TurnTokens
from agentrl.distributed import MeshShape, Ranks
from agentrl.errors import ConfigError
from agentrl.store import TrajectoryStore
from agentrl.trainer.bootstrap import WorkerGroup
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights
from agentrl.trainer.merging import built_step, why_unmerged, with_exact_merge
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


def random_bits(turns: int, length: int) -> SelectedGroup:
    """A tree that branches at almost every token."""
    rng = np.random.default_rng(0)
    return group_of([[1, *rng.integers(0, 2, length)] for _ in range(turns)])


def shared(prefix: int) -> SelectedGroup:
    """Two turns of which one saves the prefix."""
    return group_of([[*range(100, 100 + prefix), 1], [*range(100, 100 + prefix), 2]])


@pytest.mark.parametrize(
    ("group", "flag", "way"),
    [
        (random_bits(128, 12), "auto", "packed"),
        (random_bits(512, 10), "auto", "tree"),
        (shared(15), "auto", "packed"),
        (shared(16), "auto", "tree"),
        (shared(15), "tree", "tree"),
        (shared(16), "packed", "packed"),
        (shared(16), "none", "none"),
    ],
)
def test_a_tree_must_save_eight_tokens_a_turn(
    group: SelectedGroup, flag: Literal["auto"] | Merge, way: str
) -> None:
    build = partial(build_step, [group], policy_version=0, token_budget=65536)
    assert built_step(build, flag).stats.merge == way


def test_a_cut_that_repeats_prefixes_counts() -> None:
    # Every bin holds one turn, so that the tree saves nothing.
    group = group_of([[*range(16), turn, 50] for turn in (30, 40)])
    ways = []
    for token_budget in (18, 17):
        build = partial(build_step, [group], policy_version=0, token_budget=token_budget)
        ways.append(built_step(build, "auto").stats.merge)
    assert ways == ["tree", "packed"]


def rope(kind: str, **more: Any) -> PretrainedConfig:
    return LlamaConfig(
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0, **more}
    )


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_row_are_not_merged(kind: str) -> None:
    reason = why_unmerged(rope(kind, short_factor=[1.0] * 64, long_factor=[2.0] * 64))
    assert reason == f"its rotary frequencies ({kind}) depend on the row's length"
    assert why_unmerged(LlamaConfig()) is None


def test_a_family_that_is_not_on_the_list_is_not_merged() -> None:
    assert "proven exact" in str(why_unmerged(AutoConfig.for_model("jamba")))


def test_a_family_whose_code_a_checkpoint_brings_is_not_merged() -> None:
    config = tiny_config("qwen3")
    config.auto_map = {"AutoModelForCausalLM": "modeling_own.Own"}
    assert why_unmerged(config) is None
    assert why_unmerged(config, trust_remote_code=True) == "its Python code is its own"


def test_what_cannot_be_merged_is_trained_turn_by_turn_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rope("dynamic").save_pretrained(tmp_path)
    given = LearnerSettings(
        weights=StartWeights(tmp_path),
        model=ModelSection(model_name_or_path=str(tmp_path)),
        trainer=TrainerSection(),
        algorithm=None,
        seed=0,
    )
    with caplog.at_level(logging.WARNING):
        found = with_exact_merge(given, MeshShape())
    assert found.trainer.merge == "none"
    (record,) = caplog.records
    assert record.message.startswith("NOT MERGED: llama models train one turn per forward pass")
    with pytest.raises(ConfigError, match="--cp_size 2 needs layers that support token trees"):
        with_exact_merge(given, MeshShape(cp=2))
    LlamaConfig().save_pretrained(tmp_path)
    assert with_exact_merge(given, MeshShape(cp=2)) is given


async def play(store: TrajectoryStore, model_path: Path) -> None:
    await store.tasks.add(train_tasks(4, 3))
    await Player(model_path).play_groups(store, [[1.0, 0.0, 0.0]] * 4)


@pytest.mark.parametrize("way", ["tree", "packed"])
async def test_replay_computes_a_step_as_it_was_computed(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, way: str
) -> None:
    await play(store, model_path)
    await lead(make_config(merge=way, max_steps="1"), Ranks(), stop=asyncio.Event())
    config = make_config(merge="auto", max_steps="1")
    recorded = recorded_steps(config, 1, 1)[1]
    images = RecordImages(store, image_reader(model_path, config.model))
    settings = learner_settings(config, None, Ranks().shape)
    async with WorkerGroup(Ranks(), settings) as learners:
        replayed = await _replay_step(config, store, learners, recorded, images, lost=())
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
