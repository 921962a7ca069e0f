"""Every trained turn leaves its ratios, and every other one the reason why it was left out."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from support.training import MakeConfig, Player, train_tasks

from agentrl.distributed import Ranks
from agentrl.schema import TOKEN_USES
from agentrl.store import TrajectoryStore
from agentrl.trainer.rl.training_loop import lead


async def test_a_step_leads_to_what_it_made_of_each_turn(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await store.tasks.add(train_tasks(3, 3))
    await Player(model_path).play_groups(store, [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    await lead(make_config(max_steps=1), Ranks(), stop=asyncio.Event())
    step = await store.lineage.of_step(1)
    assert step.policy is not None
    assert {record.task_id for record in step.trained} == {"train/0/q0", "train/0/q2"}
    for record in step.trained:
        assert [len(turn.trainings) for turn in record.turns] == [1, 1]
        for turn in record.turns:
            (made,) = turn.trainings
            assert (made.num_tokens, made.num_trained_tokens, made.masked) == (4, 4, {})
            assert made.ratio is not None
            # The behavior logprobs are this very model's own.
            assert made.ratio.min == pytest.approx(1.0, abs=1e-3)
            assert made.ratio.max == pytest.approx(1.0, abs=1e-3)
            assert made.advantage is not None
            assert np.sign(made.advantage) == (1 if record.score else -1)
    assert {record.task_id for record in step.dropped} == {"train/0/q1"}
    reasons = [turn.trainings[0].masked for record in step.dropped for turn in record.turns]
    assert len(reasons) == 6
    assert all(list(masked.values()) == [4] for masked in reasons)
    assert {why for masked in reasons for why in masked} == {
        record.ledger["trainer"].reason for record in step.dropped
    }


async def test_every_sampled_token_is_trained_or_counted_by_its_reason(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await store.tasks.add(train_tasks(3, 3))
    await Player(model_path).play_groups(store, [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    # A drop range of next to nothing: rounding alone takes tokens out of it.
    config = make_config(max_steps=1, importance_weight_cap_ratio=1e-9, min_turns=3)
    result = await lead(config, Ranks(), stop=asyncio.Event())
    step = json.loads((result.output_path / "metrics.jsonl").read_text())
    masked = step["masked_tokens"]
    assert masked["zero_variance"] == 3 * 2 * 4
    assert masked["few_turns"] == 2 * 2 * 4
    assert masked["ratio_out_of_range"] > 0
    assert sum(masked.values()) + step["num_trained_tokens"] == step["num_output_tokens"] == 72
    written: dict[str, int] = {}
    for record in (await store.lineage.of_step(1)).trained + (
        await store.lineage.of_step(1)
    ).dropped:
        for turn in record.turns:
            for reason, count in turn.trainings[0].masked.items():
                written[reason] = written.get(reason, 0) + count
    assert written == masked


async def test_every_token_leaves_its_ratio_its_entropy_and_what_became_of_it(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await store.tasks.add(train_tasks(2, 3))
    await Player(model_path).play_groups(store, [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    config = make_config(max_steps=1, importance_weight_cap_ratio=1e-9)
    await lead(config, Ranks(), stop=asyncio.Event())
    lineage = await store.lineage.of_step(1)
    of_record = {one.record_id: one.turns for one in lineage.trained}
    assert of_record
    dropped = 0
    for record_id, found in of_record.items():
        for turn in await store.turns.of_record(record_id):
            training = await store.lineage.last_training(turn)
            assert training is not None
            assert training.tokens is not None
            assert training.ratio is not None
            ratios = np.exp(np.frombuffer(training.tokens.log_ratios, "<f2").astype(np.float64))
            assert len(ratios) == len(turn.output_ids)
            assert ratios.mean() == pytest.approx(training.ratio.mean, abs=1e-3)
            assert (np.frombuffer(training.tokens.entropies, "<f2") > 0).all()
            uses = [TOKEN_USES[use] for use in training.tokens.uses]
            assert uses.count("ratio_out_of_range") == training.masked.get("ratio_out_of_range", 0)
            dropped += uses.count("ratio_out_of_range")
        # Who looks at records reads none of it.
        assert all(one.trainings[0].tokens is None for one in found)
    assert dropped
