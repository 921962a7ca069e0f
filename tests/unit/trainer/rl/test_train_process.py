import asyncio
import contextlib
import json
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.training import MakeConfig, Player, train_tasks

from agentrl.algorithms.losses import LOSSES, LossInputs, TargetLosses
from agentrl.config.sections import RootConfig, TrainerSection
from agentrl.data.batch import StepBatch, build_training_step
from agentrl.data.rows import Merge
from agentrl.datasets.task_stream import train_tasks as question_tasks
from agentrl.distributed import Ranks, read_state
from agentrl.errors import (
    ConfigError,
    DatasetError,
    LeaseLost,
    StoreError,
    TrainerBusy,
    TrainingError,
)
from agentrl.runtime.processes.process_identity import new_lease_owner
from agentrl.schema import Record, Run, Score, Split, rebuild_prompts
from agentrl.schema.lost_versions import LostVersions
from agentrl.store import TrajectoryStore
from agentrl.trainer.bootstrap import WorkerGroup, mesh_shape
from agentrl.trainer.checkpoint import Checkpoint, latest_checkpoint
from agentrl.trainer.learner.learner import StepOutcome
from agentrl.trainer.metrics import measures
from agentrl.trainer.metrics.history import StepMetrics
from agentrl.trainer.rl import training_loop as loop
from agentrl.trainer.rl.run_upkeep import TrainResult
from agentrl.trainer.rl.training_loop import lead

# The first test that runs pays for importing torch, transformers and matplotlib.

MIXED = [1.0, 0.0, 0.0]
EQUAL = [1.0, 1.0, 1.0]
Ledger = dict[str, list[tuple[str, int, str | None] | None]]


async def train(config: RootConfig, stop: asyncio.Event | None = None) -> TrainResult:
    return await lead(config, Ranks(), stop=stop or asyncio.Event())


async def fill(
    store: TrajectoryStore,
    model_path: Path,
    scores: Sequence[Sequence[float]],
    *,
    num_tasks: int | None = None,
) -> None:
    await store.tasks.add(train_tasks(num_tasks or len(scores), len(scores[0])))
    await Player(model_path).play_groups(store, scores)


async def run_of(store: TrajectoryStore) -> Run:
    run = await store.runs.get()
    assert run is not None
    return run


def newest_checkpoint(output_path: Path) -> Checkpoint:
    found = latest_checkpoint(output_path)
    assert found is not None
    return found


async def ledger_of(store: TrajectoryStore, split: Split = "train") -> Ledger:
    """Task id -> (status, step, reason) of its records; None for ready ones."""
    found: Ledger = {}
    async for task in store.tasks.find(split=split):
        document = await store.database["record_data"].find({"task_id": task.id}).to_list()
        found[task.id] = [
            (entry["status"], entry["step"], entry["reason"])
            if "status" in (entry := data.get("ledger", {}).get("trainer", {}))
            else None
            for data in document
        ]
    return found


@contextlib.asynccontextmanager
async def samplers(
    store: TrajectoryStore, player: Player, score: Callable[[Record], float]
) -> AsyncIterator[dict[str, list[int]]]:
    """Play admitted slots beside the trainer, as samplers would; yields what they noticed."""
    noticed: dict[str, list[int]] = {"admitted": [], "versions": []}

    async def sample() -> None:
        while True:
            run = await store.runs.get()
            claimed = run and await store.records.claim(
                "player:1:0", lease_seconds=30, admitted_groups=run.admitted_groups, max_attempts=3
            )
            if not run or not claimed:
                await asyncio.sleep(0.01)
                continue
            noticed["admitted"].append(run.admitted_groups)
            noticed["versions"].append(run.policy_version)
            record = claimed[0]
            await player.finish(store, record, score(record), version=run.policy_version)

    task = asyncio.create_task(sample())
    try:
        yield noticed
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_prefilled_run_trains_reports_and_ends(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED, EQUAL, MIXED, MIXED, MIXED])
    config = make_config(max_steps=2)
    result = await train(config)
    assert (result.status, result.step) == ("completed", 2)
    summary = json.loads(result.summary_path.read_text())
    assert summary["steps"] == 2
    assert summary["reward_mean"] == pytest.approx([5 / 9, 1 / 3])
    assert summary["dropped"] == {"zero_variance": 3}
    assert summary["tokens"]["sampled"] == 5 * 3 * 2 * 4
    assert summary["tokens"]["trained"] == 4 * 3 * 2 * 4
    assert summary["staleness"]["max"] == 1
    assert {"total", "wait_samples", "forward_backward", "checkpoint"} <= summary["seconds"].keys()
    assert result.picture_path.read_bytes().startswith(b"\x89PNG")
    lines = (result.output_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert (await run_of(store)).status == "completed"
    assert await ledger_of(store) == {
        "train/0/q0": [("trained", 1, None)] * 3,
        "train/0/q1": [("dropped", 1, "zero_variance")] * 3,
        "train/0/q2": [("trained", 1, None)] * 3,
        "train/0/q3": [("trained", 2, None)] * 3,
        "train/0/q4": [("trained", 2, None)] * 3,
    }


async def test_the_run_ends_when_its_data_does_with_a_last_smaller_step(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED, MIXED, MIXED])
    result = await train(make_config(max_steps=50))
    assert (result.status, result.step) == ("data_ended", 2)
    assert (await run_of(store)).status == "completed"


async def test_a_finished_run_is_not_trained_further(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED] * 4)
    config = make_config(max_steps=1)
    first = await train(config)
    weights = (first.output_path / "policy/000001/model.safetensors").read_bytes()
    again = await train(config)
    assert (again.status, again.step) == ("completed", 1)
    assert (first.output_path / "policy/000001/model.safetensors").read_bytes() == weights
    assert json.loads(again.summary_path.read_text())["steps"] == 1


async def test_a_damaged_checkpoint_costs_only_the_steps_since_the_one_before(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED] * 4)
    config = make_config(max_steps=2, save_steps=1, save_total_limit=2)
    first = await train(config)
    ledger, summary = await ledger_of(store), json.loads(first.summary_path.read_text())
    weights = newest_checkpoint(first.output_path).model_path / "model.safetensors"
    written = weights.read_bytes()
    weights.unlink()  # the published policy shares its content
    weights.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    again = await train(config)
    assert (again.status, again.step) == ("completed", 2)
    assert newest_checkpoint(first.output_path).model_path / "model.safetensors" == weights
    assert weights.read_bytes() == written
    kept = first.output_path / "checkpoints/000002.damaged/model/model.safetensors"
    assert kept.read_bytes() != written
    assert await ledger_of(store) == ledger
    resumed = json.loads(again.summary_path.read_text())
    assert resumed["reward_mean"] == summary["reward_mean"]
    run = await run_of(store)
    assert (run.policy_version, run.step) == (3, 2)
    assert run.lost_versions == (LostVersions(after=1, last=2),)
    # Without any checkpoint, both steps are made again, of the same groups.
    shutil.rmtree(first.output_path / "checkpoints")
    await train(config)
    assert await ledger_of(store) == ledger
    run = await run_of(store)
    assert (run.policy_version, run.step) == (5, 2)
    assert run.lost_versions == (LostVersions(after=0, last=3),)
    policies = await store.policies.all()
    assert [policy.version for policy in policies] == [*range(6)]
    sums = [policy.checksum for policy in policies]
    assert sums == [*sums[:3], sums[2], sums[1], sums[2]]
    lineage = await store.lineage.of_step(2)
    assert lineage.policy == policies[5]


async def test_the_first_published_version_is_the_model_itself(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED, MIXED])
    result = await train(make_config(max_steps=1, learning_rate=0))
    policies = await store.policies.all()
    assert [policy.version for policy in policies] == [0, 1]
    assert policies[0].checksum == policies[1].checksum
    assert (await run_of(store)).policy_version == 1
    assert newest_checkpoint(result.output_path).step == 1


async def test_bfloat16_is_for_computing_and_steps_add_up_in_float32(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, tmp_path: Path
) -> None:
    """Steps far below bfloat16's resolution are kept, also over a restart."""
    await fill(store, model_path, [MIXED] * 4)
    flags = {"torch_dtype": "bfloat16", "learning_rate": 1e-7, "groups_per_step": 1}
    await train(make_config(**flags, max_steps=1))
    config = make_config(**flags, max_steps=2)
    result = await train(config)
    exported = load_file(result.output_path / "policy/000002/model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    served = json.loads((result.output_path / "policy/000002/config.json").read_text())
    assert served["dtype"] == "bfloat16"
    start = load_file(model_path / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    moved = []
    for step in (1, 2):
        state = {"master": {"model.model.layers.0.mlp.up_proj.weight": torch.zeros_like(start)}}
        read_state(state, result.output_path / f"checkpoints/00000{step}/state", Ranks())
        (master,) = state["master"].values()
        moved.append((master - start).abs().max().item())
    assert 0 < moved[0] < moved[1] < 3e-7


@pytest.mark.parametrize(
    "flags",
    [
        {"loss_calculator": "MINIRL", "token_level_loss": "false", "strict_in_bound": "true"},
        {"loss_calculator": "GSPO", "merge": "packed"},
        {"loss_calculator": "CISPO", "skip_length_normalization": "true"},
        {"out_of_date_decay": 0.1, "beta1": 0.5, "beta2": 0.5, "merge": "none"},
    ],
    ids=["minirl", "gspo", "cispo", "ce-gppo"],
)
async def test_every_loss_moves_the_weights(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, flags: dict[str, Any]
) -> None:
    await fill(store, model_path, [MIXED])
    result = await train(make_config(max_steps=1, groups_per_step=1, **flags))
    policies = await store.policies.all()
    assert policies[0].checksum != policies[1].checksum
    assert json.loads(result.summary_path.read_text())["tokens"]["trained"] > 0


async def test_scores_of_single_turns_reach_the_loss_of_their_tokens(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    """Two right tries; one earns 2 at its first turn and loses 1 at its second."""
    await store.tasks.add(train_tasks(1, 2))
    player = Player(model_path)
    for steps in ((2.0, -1.0), ()):
        claimed = await store.records.claim(
            "player:1:0", lease_seconds=30, admitted_groups=1, max_attempts=1
        )
        assert claimed is not None
        record, _ = claimed
        await player.finish(store, record, 1.0, step_scores=steps)
    await train(make_config(max_steps=1, groups_per_step=1, num_generations=2, learning_rate=1e-3))
    trained = Player(newest_checkpoint(make_config().run.output_path).model_path)

    async def change(record_id: str) -> list[float]:
        """By how much each turn's tokens became likelier."""
        turns = await store.turns.of_record(record_id)
        return [
            float((trained.logprobs(prompt, turn.output_ids) - turn.output_logprobs).sum())
            for prompt, turn in zip(rebuild_prompts(turns), turns, strict=True)
        ]

    good, bad = await change("train/0/q0/0")
    assert good > 0.05
    assert bad < -0.05
    # The other learns that its second turn lost nothing.
    assert await ledger_of(store) == {"train/0/q0": [("trained", 1, None)] * 2}


async def test_samplers_are_admitted_within_the_staleness_bound(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await store.tasks.add(train_tasks(10, 3))
    player = Player(model_path)
    config = make_config(max_steps=4, max_staleness=1, enable_sampling="true")
    async with samplers(store, player, lambda record: float(record.traj_id == 0)) as noticed:
        result = await train(config)
    assert result.status == "completed"
    for admitted, version in zip(noticed["admitted"], noticed["versions"], strict=True):
        assert admitted <= (version + 2) * 2
    # Nothing is begun that the last step could not consume.
    assert max(noticed["admitted"]) == (await run_of(store)).admitted_groups == 8
    summary = json.loads(result.summary_path.read_text())
    assert summary["staleness"]["max"] <= 1
    assert summary["dropped"] == {}


async def test_dropped_groups_make_room_for_others_at_once(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    """With staleness 0 exactly one step's groups are admitted: a dropped one must be replaced."""
    await store.tasks.add(train_tasks(8, 3))
    config = make_config(max_steps=2, max_staleness=0, enable_sampling="true")

    def score(record: Record) -> float:
        return 1.0 if record.order in (1, 4) else float(record.traj_id == 0)

    async with samplers(store, Player(model_path), score):
        result = await asyncio.wait_for(train(config), 20)
    assert result.status == "completed"
    assert json.loads(result.summary_path.read_text())["dropped"] == {"zero_variance": 6}


async def test_stale_groups_are_dropped_and_counted(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED] * 6)
    result = await train(make_config(max_steps=9, max_staleness=0))
    assert (result.status, result.step) == ("data_ended", 1)
    summary = json.loads(result.summary_path.read_text())
    assert summary["dropped"] == {"stale": 12}
    assert summary["staleness"]["max"] == 0


async def test_a_step_updates_the_weights_as_often_as_asked(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED, MIXED])
    config = make_config(max_steps=9, groups_per_step=1, max_trained_count=3)
    result = await train(config)
    assert (result.status, result.step) == ("data_ended", 2)
    summary = json.loads(result.summary_path.read_text())
    assert (summary["groups"], summary["records"]["consumed"]) == ({"consumed": 2}, 6)
    data = [data async for data in store.ledger.find(status="trained")]
    assert [one.ledger["trainer"].trained_count for one in data] == [1] * 6
    assert all(ratio != 1 for ratio in await ratios(store)), "of the first update"


async def ratios(store: TrajectoryStore) -> list[float]:
    trainings = await store.database["turn_training"].find({"ratio": {"$ne": None}}).to_list()
    assert trainings
    return [one["ratio"]["mean"] for one in trainings]


async def test_a_signal_in_the_second_update_lets_the_step_end(
    make_config: MakeConfig,
    store: TrajectoryStore,
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await fill(store, model_path, [MIXED] * 3)
    make, outcomes = WorkerGroup.optim_step, []
    stop = asyncio.Event()

    async def optim_step(self: WorkerGroup, num_done: int) -> StepOutcome:
        stop.set()
        outcomes.append(await make(self, num_done))
        return outcomes[-1]

    monkeypatch.setattr(WorkerGroup, "optim_step", optim_step)
    config = make_config(max_steps=3, groups_per_step=1, max_trained_count=2)
    result = await lead(config, Ranks(), stop=stop)
    assert (result.status, result.step, len(outcomes)) == ("stopped", 1, 2)
    assert newest_checkpoint(config.run.output_path).step == 1


async def test_evaluations_before_and_after_are_played_under_their_version(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "eval.jsonl"
    questions.write_text("".join(f'{{"id":"e{n}","query":"q","answer":{n}}}\n' for n in range(3)))
    await store.tasks.add(train_tasks(2, 3))
    config = make_config(
        max_steps=1, eval_strategy="ends", eval_file=questions, enable_sampling="true"
    )

    def score(record: Record) -> float:
        if record.split == "train":
            return float(record.traj_id == 0)
        return float(record.task_id.startswith("eval/1/") or record.task_id == "eval/0/e0")

    async with samplers(store, Player(model_path), score):
        result = await train(config)
    summary = json.loads(result.summary_path.read_text())
    assert summary["eval_reward"]["before"] == pytest.approx(1 / 3)
    assert summary["eval_reward"]["after"] == 1.0
    assert await store.tasks.count(tag="eval@0", status="completed") == 3
    assert await store.tasks.count(tag="eval@1", status="completed") == 3


async def test_a_stop_during_the_last_evaluation_leaves_it_to_the_same_command(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "eval.jsonl"
    questions.write_text('{"id":"e0","query":"q","answer":1}\n')
    await fill(store, model_path, [MIXED, MIXED])
    config = make_config(
        max_steps=1,
        eval_strategy="steps",
        eval_steps=9,
        eval_file=questions,
        enable_sampling="true",
    )
    player, stop = Player(model_path), asyncio.Event()
    training = asyncio.create_task(train(config, stop))
    async with asyncio.timeout(60), samplers(store, player, lambda _: 1.0):
        while not await store.tasks.count(tag="eval@0", status="completed"):
            await asyncio.sleep(0.02)
    async with asyncio.timeout(60):  # nobody plays the last one
        while not await store.tasks.count(tag="eval@1"):
            await asyncio.sleep(0.02)
    stop.set()
    result = await training
    assert (result.status, result.step) == ("stopped", 1)
    assert (await run_of(store)).status == "training"
    async with samplers(store, player, lambda _: 1.0):
        result = await train(config)
    assert (result.status, result.step) == ("completed", 1)
    assert (await run_of(store)).status == "completed"
    evals = json.loads(result.summary_path.read_text())["evals"]
    assert [one["version"] for one in evals] == [0, 1]


async def test_every_eval_steps_an_evaluation_runs_to_its_end_and_means_over_questions(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "eval.jsonl"
    questions.write_text("".join(f'{{"id":"e{n}","query":"q","answer":{n}}}\n' for n in range(2)))
    await store.tasks.add(train_tasks(5, 2))
    config = make_config(
        max_steps=5,
        groups_per_step=1,
        num_generations=2,
        max_staleness=0,
        eval_strategy="steps",
        eval_steps=2,
        eval_file=questions,
        eval_num_generations=2,
        enable_sampling="true",
    )

    def score(record: Record) -> float:
        """Right are one try of question 0, and from version 4 on both tries of question 1."""
        if record.split == "train" or record.task_id.endswith("e0"):
            return float(record.traj_id == 0)
        return float(record.task_id.startswith(("eval/4/", "eval/5/")))

    async with samplers(store, Player(model_path), score):
        result = await train(config)
    evals = json.loads(result.summary_path.read_text())["evals"]
    found = {e["version"]: (e["reward_mean"], e["total"]["pass_at"]) for e in evals}
    assert found == {
        0: (0.25, {"1": 0.25, "2": 0.5}),
        2: (0.25, {"1": 0.25, "2": 0.5}),
        4: (0.75, {"1": 0.75, "2": 1.0}),
        5: (0.75, {"1": 0.75, "2": 1.0}),
    }


async def test_evaluations_beside_training_do_not_stop_it_and_count_what_left_their_version(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "eval.jsonl"
    questions.write_text("".join(f'{{"id":"e{n}","query":"q","answer":{n}}}\n' for n in range(2)))
    await store.tasks.add(train_tasks(6, 3))
    player = Player(model_path)

    async def sample() -> None:
        """Plays one try of the evaluation of version 1 only once version 3 is out."""
        held = None
        while True:
            run = await store.runs.get()
            if run is not None and held is not None and run.policy_version == 3:
                await player.finish(store, held, 0.0, version=3)
                held = None
            claimed = run and await store.records.claim(
                "player:1:0", lease_seconds=30, admitted_groups=run.admitted_groups, max_attempts=3
            )
            if not run or not claimed:
                await asyncio.sleep(0.01)
            elif claimed[0].task_id == "eval/1/e0":
                held = claimed[0]
            else:
                score = 1.0 if claimed[0].split == "eval" else float(claimed[0].traj_id == 0)
                await player.finish(store, claimed[0], score, version=run.policy_version)

    config = make_config(
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        eval_file=questions,
        enable_sampling="true",
    )
    sampling = asyncio.create_task(sample())
    result = await train(config)
    sampling.cancel()
    assert result.step == 3
    evals = {e["version"]: e for e in json.loads(result.summary_path.read_text())["evals"]}
    assert list(evals) == [0, 1, 2, 3]
    assert evals[1]["num_off_version"] >= 1
    assert evals[1]["reward_mean"] == 0.5
    assert evals[1]["on_version"] is None or evals[1]["on_version"]["mean"] == 1.0
    assert evals[3]["num_off_version"] == 0
    assert evals[3]["total"]["pass_at"] == {"1": 1.0}


async def test_an_evaluation_that_nobody_plays_ends_with_what_is_missing(
    make_config: MakeConfig, store: TrajectoryStore, tmp_path: Path
) -> None:
    questions = tmp_path / "eval.jsonl"
    questions.write_text('{"query":"q","answer":1}\n')
    await store.tasks.add(train_tasks(2, 3))
    config = make_config(eval_strategy="ends", eval_file=questions, eval_timeout_seconds=0.3)
    with pytest.raises(StoreError, match=r"eval@0: 0 of 1 questions .* 0 inference server"):
        await train(config)


async def test_a_stop_finishes_the_step_and_saves(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED] * 3, num_tasks=10)
    stop = asyncio.Event()
    config = make_config(max_steps=5, save_steps=5, enable_sampling="true")
    training = asyncio.create_task(train(config, stop))
    metrics = config.run.output_path / "metrics.jsonl"
    async with asyncio.timeout(60):
        while not (metrics.is_file() and metrics.read_text().strip()):
            await asyncio.sleep(0.02)
    stop.set()
    result = await training
    assert (result.status, result.step) == ("stopped", 1)
    assert newest_checkpoint(result.output_path).step == 1
    # What was reserved for the step that was not made is ready again.
    assert (await ledger_of(store))["train/0/q2"] == [None] * 3
    assert (await run_of(store)).status == "training"


WAITING_LOSS = """
import time
from pathlib import Path

WAIT = Path(__file__).with_name("wait")
DONE = []


def after(step):
    DONE.append(step)


def loss(inputs):
    if DONE and WAIT.exists():
        with WAIT.open("a") as passes:
            passes.write("x")
        while WAIT.exists():
            time.sleep(0.01)
    return -inputs.advantages * inputs.policy_logprobs
"""


async def test_a_stop_within_a_step_leaves_it_to_the_next_start(
    make_config: MakeConfig,
    store: TrajectoryStore,
    model_path: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own, wait = tmp_path / "own.py", tmp_path / "wait"
    own.write_text(WAITING_LOSS)
    functions = {"loss_calculator": f"{own}:loss", "on_step": f"{own}:after"}
    flags = {"max_steps": 2, "save_steps": 5, "max_tokens": 64, **functions}
    await fill(store, model_path, [MIXED] * 4)
    wait.touch()
    stop, config = asyncio.Event(), make_config(**flags)
    training = asyncio.create_task(train(config, stop))
    async with asyncio.timeout(60):
        while not wait.read_text():
            await asyncio.sleep(0.02)
        stop.set()
        with caplog.at_level(logging.INFO):
            while "ends before its gradients are whole" not in caplog.text:
                await asyncio.sleep(0.02)
    passes = wait.read_text()
    wait.unlink()
    result = await training
    assert passes == "x"
    assert (result.status, result.step) == ("stopped", 1)
    assert newest_checkpoint(result.output_path).step == (await run_of(store)).saved_step == 1
    assert (await ledger_of(store))["train/0/q2"] == [None] * 3
    caplog.clear()
    result = await train(config)
    assert (result.status, result.step) == ("completed", 2)
    whole = await train(make_config(**flags, consumer="other", output_dir=str(tmp_path / "whole")))
    resumed_steps, whole_steps = (
        [
            (step.step, step.loss, step.grad_norm)
            for line in (one.output_path / "metrics.jsonl").read_text().splitlines()
            if '"step"' in line
            for step in [StepMetrics.model_validate_json(line)]
        ]
        for one in (result, whole)
    )
    assert resumed_steps == whole_steps
    files = [newest_checkpoint(one.output_path).model_path for one in (result, whole)]
    tensors = [load_file(file / "model.safetensors") for file in files]
    assert all(torch.equal(tensors[0][name], value) for name, value in tensors[1].items())


async def test_a_second_trainer_is_refused(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED] * 2)
    await store.runs.create(Run(name=store.database_name))
    async with TrajectoryStore.connect(store.database.uri, store.database_name) as other:
        await other.trainer_leases.acquire("trainer", new_lease_owner(), 30)
        with pytest.raises(TrainerBusy):
            await train(make_config())


async def test_a_waiting_trainer_follows_live_changes_and_a_restart_keeps_them(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED], num_tasks=9)
    flags = {"max_staleness": 0, "groups_per_step": 2, "enable_sampling": "true", "max_steps": 9}
    stop = asyncio.Event()
    job = asyncio.create_task(train(make_config(**flags), stop))
    try:
        async with asyncio.timeout(60):
            while not ((run := await store.runs.get()) and run.admitted_groups == 2):
                await asyncio.sleep(0.05)
        await store.runs.update_control(max_staleness=3)
        async with asyncio.timeout(60):
            while (await run_of(store)).admitted_groups != 8:
                await asyncio.sleep(0.05)
        await store.runs.update_control(groups_per_step=1)
        async with asyncio.timeout(60):
            while (await run_of(store)).policy_version < 1:
                await asyncio.sleep(0.05)
        stop.set()
        result = await asyncio.wait_for(job, 20)
    finally:
        job.cancel()
    assert (result.status, result.step) == ("stopped", 1)
    await train(make_config(**flags), stop)
    run = await run_of(store)
    assert (run.control.max_staleness, run.control.groups_per_step) == (3, 1)


async def test_a_resumed_run_has_the_flags_of_its_last_start(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED] * 2)
    for num_steps in (1, 2):
        await train(make_config(max_steps=num_steps))
        assert (await run_of(store)).config["max_steps"] == num_steps


async def test_two_consumers_train_on_one_stream_and_leave_each_others_ledgers_alone(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, tmp_path: Path
) -> None:
    await fill(store, model_path, [MIXED, EQUAL, MIXED, MIXED, MIXED])
    reader = {"consumer": "reader", "groups_per_step": 2}
    config = make_config(**reader)
    unnamed = config.run.model_copy(update={"output_dir": None})
    with pytest.raises(ConfigError, match="needs a separate --output_dir"):
        await train(config.model_copy(update={"run": unnamed}))
    with pytest.raises(ConfigError, match="does not exist yet"):
        await train(make_config(**reader))
    await train(make_config(max_steps=1))
    before = await ledger_of(store)
    run = await run_of(store)
    policies = await store.policies.all()
    result = await train(make_config(**reader, output_dir=tmp_path / "reader", max_steps=2))
    assert (result.status, result.step) == ("completed", 2)
    assert await ledger_of(store) == before
    after = await run_of(store)
    assert after.model_copy(update={"trainer_leases": {}}) == run.model_copy(
        update={"trainer_leases": {}}
    )
    assert await store.policies.all() == policies
    theirs = [data async for data in store.ledger.find("reader", status="trained")]
    assert len(theirs) == 12
    assert (await store.reports.progress("reader")).num_groups_consumed == 5
    assert (await store.reports.progress()).num_groups_consumed == 3
    weights = load_file(result.output_path / "policy/000001/model.safetensors")
    first = load_file(make_config().run.output_path / "policy/000001/model.safetensors")
    assert all(torch.equal(weights[name], first[name]) for name in first), "identical data"


async def test_a_run_that_could_learn_nothing_ends_with_a_status_of_its_own(
    make_config: MakeConfig,
    store: TrajectoryStore,
    model_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await fill(store, model_path, [EQUAL] * 5)
    result = await train(make_config(groups_per_step=1, max_steps=3))
    assert (result.status, result.step) == ("no_signal", 0)
    run = await store.runs.get()
    assert run is not None
    assert run.status == "no_signal"
    summary = json.loads(result.summary_path.read_text())
    assert summary["status"] == "no_signal"
    found = summary["no_signal"]
    assert (found["num_groups"], found["num_equal"], found["num_kept"]) == (5, 5, 0)
    assert len(found["examples"]) == 3
    (said,) = [r.getMessage() for r in caplog.records if "nothing to learn from" in r.getMessage()]
    assert "5 of 5 groups had equal scores (mean " in said
    assert "what to try: " in said


@pytest.mark.parametrize(
    ("num_equal", "status"), [(11, "no_signal"), (8, "data_ended")], ids=["of 12", "of 9"]
)
async def test_a_run_that_trained_hardly_any_group_has_learned_nothing(
    make_config: MakeConfig,
    store: TrajectoryStore,
    model_path: Path,
    num_equal: int,
    status: str,
) -> None:
    await fill(store, model_path, [*[EQUAL] * num_equal, MIXED])
    result = await train(make_config(groups_per_step=2, max_steps=3))
    assert (result.status, result.step) == (status, 1)


async def test_a_trainer_waits_for_the_scores_of_the_scorer_that_it_names(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED, EQUAL])
    flags = {"trained_scorer": "other@2", "groups_per_step": 1, "max_steps": 1}
    result = await train(make_config(**flags))
    assert (result.status, result.step) == ("data_ended", 0)
    async for record in store.records.find(status="scored"):
        value = float(record.traj_id == record.order)
        await store.scores.add(record.id, Score(scorer="other", version="1", value=1.0))
        await store.scores.add(record.id, Score(scorer="other", version="2", value=value))
    result = await train(make_config(**flags))
    assert (result.status, result.step) == ("completed", 1)
    summary = json.loads(result.summary_path.read_text())
    assert summary["reward_mean"] == pytest.approx([1 / 3])


async def test_a_trainer_whose_lease_was_taken_stops(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED] * 2, num_tasks=4)
    config = make_config(enable_sampling="true", trainer_lease_seconds=1.2)
    training = asyncio.create_task(train(config))
    async with asyncio.timeout(60):
        while not ((run := await store.runs.get()) and run.trainer_leases):
            await asyncio.sleep(0.02)
        # Taking over under the holder's own name raises the fence, as an expiry would.
        await store.trainer_leases.acquire("trainer", run.trainer_leases["trainer"].owner, 30)
        with pytest.raises(LeaseLost):
            await training


async def test_losses_that_stay_infinite_end_the_run(
    make_config: MakeConfig,
    store: TrajectoryStore,
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await fill(store, model_path, [MIXED] * 4)
    plain = LOSSES.formula("GRPO")

    def infinite(inputs: LossInputs) -> TargetLosses:
        losses = plain(inputs)
        assert isinstance(losses, TargetLosses)
        return losses._replace(loss=losses.loss * float("inf"))

    monkeypatch.setitem(LOSSES._built_in, "GRPO", infinite)
    monkeypatch.setattr(measures, "_MAX_CONSECUTIVE_SKIPS", 2)
    with pytest.raises(TrainingError, match=r"2 optimizer steps in a row .* non_finite_loss"):
        await train(make_config(max_steps=4))
    run = await store.runs.get()
    assert run is not None
    assert run.status == "training"
    start = (model_path / "model.safetensors").read_bytes()
    written = make_config().run.output_path / "policy/000001/model.safetensors"
    assert len(written.read_bytes()) == len(start)


async def test_a_run_of_which_every_step_was_skipped_is_not_complete(
    make_config: MakeConfig,
    store: TrajectoryStore,
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await fill(store, model_path, [MIXED] * 2)

    def nothing(inputs: LossInputs) -> torch.Tensor:
        return inputs.policy_logprobs * torch.nan

    monkeypatch.setitem(LOSSES._built_in, "GRPO", nothing)
    with pytest.raises(TrainingError, match=r"learned nothing: all steps \(1\) were skipped"):
        await train(make_config(max_steps=1))
    run = await store.runs.get()
    assert run is not None
    assert run.status == "training"


async def test_checkpoints_without_their_database_are_refused(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED] * 2)
    config = make_config(max_steps=1)
    await train(config)
    await store.drop_database()
    with pytest.raises(ConfigError, match="database is empty"):
        await train(config)


async def test_a_run_without_questions_is_refused(
    make_config: MakeConfig, store: TrajectoryStore
) -> None:
    with pytest.raises(ConfigError, match="no training tasks"):
        await train(make_config())


async def test_questions_that_a_resumed_run_brings_come_behind_those_that_it_has(
    make_config: MakeConfig, store: TrajectoryStore, tmp_path: Path
) -> None:
    def config_with(*queries: str) -> RootConfig:
        path = tmp_path / "questions.jsonl"
        path.write_text("".join(json.dumps({"query": q, "answer": "1"}) + "\n" for q in queries))
        return make_config(train_file=path)

    stop = asyncio.Event()
    stop.set()
    await train(config_with("a", "b"), stop)
    await train(config_with("a", "b", "c", "d"), stop)
    asked = [task.id async for task in store.tasks.find()]
    assert {*asked[:2]} == {"train/0/line1", "train/0/line2"}
    assert {*asked[2:]} == {"train/0/line3", "train/0/line4"}
    with pytest.raises(
        DatasetError, match="'line1' already belongs to another question of the run, 'a'"
    ):
        await train(config_with("A", "b"), stop)


async def test_questions_join_the_run_as_its_steps_come_to_need_them(
    make_config: MakeConfig, store: TrajectoryStore, tmp_path: Path, model_path: Path
) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"query": "a"}\n{"query": "b"}\n{"query": "c"}\n')
    flags = {"max_staleness": 0, "enable_sampling": "true", "num_generations": 3}
    flags |= {"train_file": path, "num_train_epochs": 10_000, "default_scorer": "exact_match"}
    player = Player(model_path)
    async with samplers(store, player, lambda record: float(record.traj_id == 0)):
        for config in (make_config(max_steps=2, **flags), make_config(max_steps=4, **flags)):
            assert (await train(config)).status == "completed"
            # Those of the next step are there, and none of all the others.
            assert await store.tasks.count() == 2 * config.trainer.max_steps + 2
    stream = islice(question_tasks(config.data, config.run.seed), 10)
    assert [task.id async for task in store.tasks.find()] == [task.id for task in stream]


async def test_verified_steps_report_their_error(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED, MIXED, MIXED, MIXED])
    config = make_config(verify_merge=2, max_tokens=9)
    result = await train(config)
    lines = [
        json.loads(line) for line in (result.output_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert "merge_error" not in lines[0]
    assert 0 < lines[1]["merge_error"] <= 1e-5


async def test_a_wrong_merge_stops_the_run_with_a_report(
    make_config: MakeConfig,
    store: TrajectoryStore,
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await fill(store, model_path, [MIXED, MIXED, MIXED, MIXED])
    build = build_training_step

    def repeats_a_weight(*arguments: Any, merge: Merge, **settings: Any) -> StepBatch:
        batch = build(*arguments, merge=merge, **settings)
        if merge != "none":
            batch.micro_batches[0][0].weights[0] *= 2
        return batch

    monkeypatch.setattr(loop, "build_training_step", repeats_a_weight)
    config = make_config(verify_merge=1)
    with pytest.raises(TrainingError, match="differs from that of separate turns"):
        await train(config)
    report = json.loads((config.run.output_path / "merge_report.json").read_text())
    assert report["step"] == 1
    assert not report["equal"]
    assert report["relative_error"] > report["tolerance"]


async def test_a_run_with_reference_and_corrections_reports_them(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED, MIXED, MIXED, MIXED])
    config = make_config(
        kl_coefficient=0.1,
        proximal="recompute",
        importance_correction="tis",
        advantage_estimator="reinforce_plus_plus",
    )
    result = await train(config)
    lines = [
        json.loads(line) for line in (result.output_path / "metrics.jsonl").read_text().splitlines()
    ]
    # The reference is where training started, so only a later step has moved away from it.
    assert lines[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert lines[1]["kl"] > lines[0]["kl"]
    assert lines[0]["mask_fraction"] == 0.0


async def test_no_figure_of_a_step_is_left_empty(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [EQUAL, MIXED, MIXED])
    config = make_config(max_steps=1, kl_coefficient=0.1, verify_merge=1, peak_tflops=1.0)
    result = await train(config)
    (line,) = (result.output_path / "metrics.jsonl").read_text().splitlines()
    figures = json.loads(line)
    of_branches = {"saved_groups", "branch_reuse"}
    assert set(StepMetrics.model_fields) - figures.keys() == {"skipped", *of_branches}
    scores = [*EQUAL, *MIXED, *MIXED]
    assert figures["reward_mean"] == pytest.approx(sum(scores) / 9)
    deviation = (sum((score - sum(scores) / 9) ** 2 for score in scores) / 9) ** 0.5
    assert figures["reward_std"] == pytest.approx(deviation)
    assert (figures["reward_min"], figures["reward_max"]) == (0.0, 1.0)
    assert (figures["turns_mean"], figures["max_output_tokens"]) == (2.0, 8)
    # In the first step the policy is the sampler's and the reference: nothing is clipped yet.
    at_rest = {name for name in StepMetrics.model_fields if name.endswith("fraction")}
    at_rest |= {"clip_fraction_positive", "clip_fraction_negative"}
    at_rest |= {"kl", "sampler_kl_k1", "sampler_kl_k2", "sampler_kl_k3"}
    at_rest.add("reward_min")
    at_rest.add("route_conflicts")  # the model is dense
    at_rest.add("loss_metrics")  # the loss is built in
    at_rest |= {
        "credit_spread",
        "branched_records",
        "teacher_wait_seconds",
    }  # neither branches nor teachers
    assert {name for name, value in figures.items() if not value} <= at_rest


def test_offloading_needs_ranks_that_shard() -> None:
    config = RootConfig(trainer=TrainerSection(cpu_offload=True))
    assert mesh_shape(config.trainer, 2).dp_shard == 2
    with pytest.raises(ConfigError, match=r"--cpu_offload .* needs several ranks"):
        mesh_shape(config.trainer, 1)
