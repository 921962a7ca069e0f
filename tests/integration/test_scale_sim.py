"""The simulation past this machine: its world in virtual time must not lose anything by itself."""

import asyncio
import importlib
import random
from pathlib import Path
from types import ModuleType

import pytest
from support.demo_run import ROOT

VIRTUAL_SECONDS = 12_000


@pytest.fixture
def scale_sim(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    scale_sim, virtual_world = map(importlib.import_module, ("scale_sim", "virtual_world"))
    monkeypatch.setattr("agentrl.inference.client.pool.SGLangClient", virtual_world.SimClient)
    monkeypatch.setattr(
        "agentrl.inference.weight_sync.publisher.SGLangClient", virtual_world.SimClient
    )
    return scale_sim


@pytest.mark.parametrize("seed", [3, 7])
def test_run_goes_to_its_very_last_step_while_servers_hang_and_die(
    scale_sim: ModuleType, tmp_path: Path, seed: int
) -> None:
    setting = scale_sim.Setting(
        num_servers=2,
        num_samplers=2,
        groups_per_step=2,
        num_generations=4,
        max_staleness=1,
        step_seconds=60.0,
        num_steps=4,
        seed=seed,
        is_whole=True,
    )
    rates = scale_sim.Rates(mean_seconds_between_failures=200.0, hang_share=0.8)
    random.seed(seed)

    async def run() -> object:
        async with asyncio.timeout(VIRTUAL_SECONDS):
            return await scale_sim.simulate(setting, rates, tmp_path)

    outcome = scale_sim.run_virtually(run)
    assert max(outcome.staleness) <= setting.max_staleness
    assert sum(outcome.staleness.values()) >= setting.num_steps * setting.groups_per_step
