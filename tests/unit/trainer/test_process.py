import asyncio
import json

import pytest
from support.training import Player, train_tasks

from agentrl.distributed import Ranks
from agentrl.errors import ConfigError
from agentrl.store import TrajectoryStore
from agentrl.trainer.process import lead

MIXED = [1.0, 0.0, 0.0]


async def test_a_prefilled_run_trains_reports_and_ends(make_config, store, mongo_uri, model_path):
    config = make_config(max_steps=2, groups_per_step=2)
    await store.add_tasks(train_tasks(5, 3))
    await Player(model_path).play_groups(store, [MIXED, [1.0, 1.0, 1.0], MIXED, MIXED, MIXED])
    result = await lead(config, Ranks(), stop=asyncio.Event())
    assert (result.status, result.step) == ("completed", 2)
    summary = json.loads(result.summary_path.read_text())
    assert summary["steps"] == 2
    assert len(summary["reward_mean"]) == 2
    print(json.dumps(summary, indent=1))
