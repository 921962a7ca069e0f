"""A real run under a few kill -9s; `scripts/chaos` plays as many as one likes."""

from pathlib import Path

import pytest
from chaos.harness import run_chaos
from chaos.plan import KINDS, plan

SEED = 20
KILLS = 10


@pytest.mark.timeout(240)  # about 30 s on idle cores
async def test_kills_of_every_kind_lose_nothing_and_do_nothing_twice(tmp_path: Path) -> None:
    outcome = await run_chaos(
        tmp_path, kills=KILLS, seed=SEED, pause_seconds=(0.2, 1.0), settle_seconds=150
    )
    found = outcome.verdict
    assert outcome.kills == KILLS
    assert set(outcome.restarts) == set(KINDS)
    assert outcome.unexpected_exits == []
    assert found.examples == []
    assert (found.lost_turns, found.incomplete_groups, found.fencing_violations) == (0, 0, 0)
    assert (found.double_trained, found.skipped) == (0, 0)
    assert found.num_steps > 0
    assert found.num_turns > 100
    assert found.num_attempts_lost > 0


def test_the_seed_replays_the_kills() -> None:
    assert plan(50, 7, (0.1, 2.0)) == plan(50, 7, (0.1, 2.0))
    assert plan(50, 7, (0.1, 2.0)) != plan(50, 8, (0.1, 2.0))
    assert sum(strike.how == "kill" for strike in plan(50, 7, (0.1, 2.0))) == 50
