"""A real run under a few kill -9s; `scripts/chaos` plays as many as one likes."""

from pathlib import Path

import pytest
from chaos.harness import KINDS, run_chaos

SEED = 20


@pytest.mark.timeout(240)  # about 40 s; five processes start again on few cores
async def test_kills_of_every_kind_lose_nothing_and_do_nothing_twice(tmp_path: Path) -> None:
    outcome = await run_chaos(
        tmp_path, kills=5, seed=SEED, pause_seconds=(0.5, 1.5), stall_every=5, settle_seconds=150
    )
    found = outcome.verdict
    assert set(outcome.killed) == set(KINDS)
    assert outcome.unexpected_exits == []
    assert found.examples == []
    assert (found.lost_turns, found.incomplete_groups, found.fencing_violations) == (0, 0, 0)
    assert (found.double_trained, found.skipped) == (0, 0)
    assert found.num_steps > 0
    assert found.num_turns > 100
