"""A trainer whose advantages are its teachers', and the replay of its steps."""

import asyncio
from pathlib import Path

from support.training import MakeConfig, Player, teach, train_tasks

from agentrl.config.sections import RootConfig
from agentrl.distributed import Ranks
from agentrl.schema import TurnTraining
from agentrl.store import TrajectoryStore
from agentrl.trainer.metrics.history import StepMetrics
from agentrl.trainer.rl.replay import replay
from agentrl.trainer.rl.training_loop import lead


async def trained(config: RootConfig, uri: str, model_path: Path) -> list[TurnTraining]:
    """Train on two groups of equal scores; return how the first step used its turns."""
    async with TrajectoryStore.connect(uri) as store:
        await store.ensure_schema()
        await store.tasks.add(train_tasks(2, 3))
        await Player(model_path).play_groups(store, [[0.0, 0.0, 0.0]] * 2)
        await teach(store, "big", [0.5, -0.25, 1.0])
        await lead(config, Ranks(), stop=asyncio.Event())
        trainings, _ = await store.ledger.trained_groups("trainer", 1)
        return trainings


async def change_fact(uri: str, turn_id: str) -> None:
    async with TrajectoryStore.connect(uri) as store:
        changed = {"teacher_logprobs.big": b"\0" * 16}
        await store.database["turns"].update_one({"_id": turn_id}, {"$set": changed})


def test_equal_scores_are_trained_on_and_replayed_bit_for_bit(
    make_config: MakeConfig, model_path: Path, mongo_uri: str
) -> None:
    config = make_config(advantage_estimator="opd", teachers="big", groups_per_step=1)
    trainings = asyncio.run(trained(config, mongo_uri, model_path))
    lines = (config.run.output_path / "metrics.jsonl").read_text().splitlines()
    steps = [StepMetrics.model_validate_json(line) for line in lines if '"step"' in line]
    assert [step.dropped for step in steps] == [{}, {}]
    assert all((step.grad_norm or 0.0) > 0.0 for step in steps)
    found = sorted({round(training.advantage or 0.0, 4) for training in trainings})
    assert found == [-0.25, 0.5, 1.0]
    replayed = replay(config, mongo_uri, 1, 2)
    assert replayed is not None
    assert [(step.equal, step.weights) for step in replayed] == [(True, "equal")] * 2

    # A changed fact is found, by its turn.
    turn_id = trainings[0].turn_id
    asyncio.run(change_fact(mongo_uri, turn_id))
    (step,) = replay(config, mongo_uri, 1, 1) or []
    assert f"turn {turn_id} advantage" in {one.what for one in step.differences}
