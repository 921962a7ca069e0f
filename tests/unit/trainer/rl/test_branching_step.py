"""A step of a group that branches: what it trains and reports, and that stored facts repeat it."""

import asyncio
from pathlib import Path

import pytest
from support.training import MakeConfig, Player, train_tasks

from agentrl.data.shown_images import ImageBook
from agentrl.distributed import Ranks
from agentrl.schema import BranchPoint, TurnWorth
from agentrl.store import TrajectoryStore
from agentrl.trainer.metrics.history import StepMetrics
from agentrl.trainer.rl.replay import _select
from agentrl.trainer.rl.training_loop import lead


async def test_a_step_of_branches_is_repeated_from_what_a_bundle_holds(
    make_config: MakeConfig,
    store: TrajectoryStore,
    mongo_uri: str,
    model_path: Path,
    tmp_path: Path,
) -> None:
    await store.tasks.add(train_tasks(1, 3))
    await Player(model_path).play_groups(store, [[1.0, 1.0, 0.0]])
    parent, _, branch = [record.id for record in await store.records.of_task("train/0/q0")]
    point = BranchPoint(record_id=parent, attempt=1, turn=1, rule="random")
    await store.database.record_data.update_one(
        {"_id": branch}, {"$set": {"branch": point.model_dump(), "round": 1}}
    )
    config = make_config(max_steps=1, groups_per_step=1, advantage_estimator="leave_one_out")
    result = await lead(config, Ranks(), stop=asyncio.Event())
    step = StepMetrics.model_validate_json((result.output_path / "metrics.jsonl").read_text())
    assert step.masked_tokens == {"inherited": 4}
    assert step.num_output_tokens == step.num_trained_tokens == 3 * 8 - 4
    assert step.branched_records == {"random": 1}
    assert step.branch_reuse == 3 * 8 / (3 * 8 - 4)
    assert step.saved_groups == 1.0
    # Parent and branch are half of a rollout each.
    assert step.reward_mean == 0.75
    assert step.reward_std == pytest.approx(0.75**0.5 / 2)
    assert step.credit_spread is not None
    assert step.credit_spread > 0
    worst = await store.lineage.lowest_credits(limit=2)
    assert {turn.turn_id for turn in worst} == {f"{parent}/1/0", f"{branch}/1/1"}
    decisions = await store.lineage.worst_decisions(limit=9)
    assert [turn.turn_id for turn in decisions] == [f"{branch}/1/1", f"{parent}/1/0"]
    assert decisions[0].worth == TurnWorth(after=0, change=-0.5, num_leaves=1, is_decision=True)

    await store.transfer.export_run(tmp_path / "export")
    async with TrajectoryStore.connect(mongo_uri, "imported") as imported:
        await imported.transfer.import_run(tmp_path / "export")
        trainings, records = await imported.ledger.trained_groups(config.trainer.consumer, 1)
        await imported.drop_database()
    groups, differences = _select(config, 1, trainings, records, ImageBook())
    assert differences == []
    (group,) = groups
    assert [turn.turn_id for turn in group.turns] == [
        f"{parent}/1/0",
        f"{parent}/1/1",
        f"{parent[:-1]}1/1/0",
        f"{parent[:-1]}1/1/1",
        f"{branch}/1/1",
    ]
    assert [turn.advantage for turn in group.turns] == pytest.approx(
        [0.5 - 1.0, 0.5 * (1.0 - 0.5), 0.5, 0.5, 0.5 * (0.0 - 1.0)]
    )
