"""How far retention goes: never beyond what a checkpoint, a flag or another training keeps."""

from pathlib import Path

from support.consumed import NUM_GROUPS, trained_run

from agentrl.config.sections import RootConfig, RunSection, StoreSection
from agentrl.store import TrajectoryStore
from agentrl.trainer.rl.run_upkeep import expire_due

TURNS_A_STEP = 4


def run_of(output: Path, saved: tuple[int, ...], **flags: object) -> RootConfig:
    """A run with checkpoints of these steps."""
    for step in saved:
        path = output / f"checkpoints/{step:06d}/state.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    store = StoreSection.model_validate(flags)
    return RootConfig(run=RunSection(run_name="run", output_dir=output), store=store)


async def test_nothing_expires_that_the_oldest_checkpoint_lacks(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    await trained_run(store)
    config = run_of(tmp_path, (), retain_steps=0)
    assert await expire_due(store, config, rest_share=0) == 0
    config = run_of(tmp_path, (2, 4), retain_steps=0)
    assert await expire_due(store, config, rest_share=0) == 2 * TURNS_A_STEP
    assert await expire_due(store, config, rest_share=0) == 0
    (tmp_path / "checkpoints/000002/state.json").unlink()
    config = run_of(tmp_path, (4,), retain_steps=1)
    assert await expire_due(store, config, rest_share=0) == TURNS_A_STEP
    assert await store.retention.expired_step() == NUM_GROUPS - 1
