"""Loops of the user's own over the steps of a run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.training import MakeConfig, Player, train_tasks

from agentrl.config.sections import RootConfig
from agentrl.distributed import Ranks
from agentrl.errors import ConfigError, TrainingError
from agentrl.store import TrajectoryStore
from agentrl.trainer.checkpoint import latest_checkpoint
from agentrl.trainer.rl.training_loop import TrainingRun, lead, opened_training

OWN_LOOP = Path(__file__).parents[4] / "examples/own_algorithm/own_loop.py"
MIXED = [1.0, 0.0, 0.0]


async def fill(store: TrajectoryStore, model_path: Path, num_groups: int) -> Player:
    await store.tasks.add(train_tasks(num_groups, 3))
    player = Player(model_path)
    await player.play_groups(store, [MIXED] * num_groups)
    return player


@asynccontextmanager
async def opened(config: RootConfig) -> AsyncIterator[TrainingRun]:
    async with opened_training(config, Ranks(), stop=asyncio.Event()) as run:
        yield run


def weights(config: RootConfig) -> dict[str, torch.Tensor]:
    checkpoint = latest_checkpoint(config.run.output_path)
    assert checkpoint is not None
    found: dict[str, torch.Tensor] = load_file(checkpoint.model_path / "model.safetensors")
    return found


async def statuses(store: TrajectoryStore) -> set[tuple[str, int]]:
    found = await store.database["record_data"].find({"split": "train"}).to_list()
    entries = [one["ledger"]["trainer"] for one in found if one.get("ledger")]
    # A ready record of a lost step has its step alone.
    return {(one["status"], one["trained_count"]) for one in entries if "status" in one}


async def test_grpo_as_a_loop_of_ones_own_trains_the_products_weights(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, tmp_path: Path
) -> None:
    await fill(store, model_path, 4)
    config = make_config()
    numbers = []
    async with opened(config) as run:
        async for groups in run.groups():
            batch = await run.build_step(groups)
            await run.learner.forward_backward(batch, f"{OWN_LOOP}:grpo", lower=0.2, upper=0.3)
            await run.learner.optim_step()
            numbers.append((await run.publish()).step)
    assert numbers == [1, 2]
    assert run.result is not None
    assert (run.result.status, run.step) == ("completed", 2)
    assert await statuses(store) == {("trained", 1)}
    stored = await store.runs.get()
    assert stored is not None
    assert stored.config["loss_calculator"] == f"{OWN_LOOP}:grpo"
    built_in = make_config(consumer="other", output_dir=str(tmp_path / "built_in"))
    await lead(built_in, Ranks(), stop=asyncio.Event())
    for name, value in weights(built_in).items():
        assert torch.equal(weights(config)[name], value), name


async def test_several_updates_of_a_step_are_those_of_a_loop(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, tmp_path: Path
) -> None:
    await fill(store, model_path, 4)
    config = make_config()
    outcomes = []
    async with opened(config) as run:
        async for groups in run.groups():
            batch = await run.build_step(groups)
            for _ in range(2):
                await run.learner.forward_backward(batch)
                outcomes.append(await run.learner.optim_step())
            await run.publish()
    assert [one.num_updates for one in outcomes] == [1, 2, 1, 2]
    assert outcomes[1].flops == 2 * outcomes[0].flops
    assert outcomes[1].seconds["forward_backward"] > outcomes[0].seconds["forward_backward"]
    twice = {"max_trained_count": 2, "output_dir": str(tmp_path / "twice")}
    once = {"output_dir": str(tmp_path / "once")}
    built_in, other = make_config(consumer="other", **twice), make_config(consumer="once", **once)
    for one in (built_in, other):
        await lead(one, Ranks(), stop=asyncio.Event())
    for name, value in weights(built_in).items():
        assert torch.equal(weights(config)[name], value), name
    assert not torch.equal(weights(other)[name], value)


async def test_batches_add_up_and_a_loop_may_end_early_and_go_on(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, 6)
    config = make_config(max_steps=3)
    norms = []
    async with opened(config) as run:
        async for groups in run.groups():
            batch = await run.build_step(groups)
            await run.learner.forward_backward(batch)
            if groups.step == 2:
                await run.learner.forward_backward(batch)
            norms.append((await run.learner.optim_step()).grad_norm)
            if groups.step == 1:  # the checkpoint of step 2 is written at the end
                await run.commit()
            await run.publish()
            if groups.step == 2:
                break
    assert norms[1] > 1.5 * norms[0]
    async with opened(config) as again:
        assert again.step == 2
        async for groups in again.groups():
            assert groups.step == 3
            break
    assert await statuses(store) == {("trained", 1)}


async def test_mistakes_of_a_loop_are_one_line(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, 4)

    async def use_wrongly() -> None:
        async with opened(make_config()) as run:
            async for groups in run.groups():
                batch = await run.build_step(groups)
                with pytest.raises(TrainingError, match=r"^no gradients: await forward_backward"):
                    await run.learner.optim_step()
                with pytest.raises(TrainingError, match=r"^there is no new step: call build_step"):
                    await run.publish()
                with pytest.raises(ConfigError, match=r"the loss <lambda> is not defined at the"):
                    await run.learner.forward_backward(batch, lambda inputs: inputs.advantages)
                with pytest.raises(ConfigError, match="loss_calculator"):
                    await run.learner.forward_backward(batch, "GRPPO")
                with pytest.raises(ConfigError, match=r"^evaluate: there are no questions"):
                    await run.evaluate()

    async def end_too_early() -> None:
        async with opened(make_config()) as run:
            async for groups in run.groups():
                await run.learner.forward_backward(await run.build_step(groups))
                await run.learner.optim_step()
                break

    with pytest.raises(TrainingError, match=r"^step 1 was not published; call publish\(\)"):
        await use_wrongly()
    with pytest.raises(TrainingError, match=r"ended after optim_step\(\) without publish\(\)"):
        await end_too_early()


async def test_sample_holds_a_conversation_that_nothing_trains_on(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    player = await fill(store, model_path, 2)
    async with opened(make_config(max_steps=1)) as run:
        asked = asyncio.create_task(run.sample("What is 2 + 3?", num_samples=2))
        while not [record async for record in store.records.find(split="eval")]:
            await asyncio.sleep(0.01)
        for score in (1.0, 0.5):
            await player.play(store, score)
        records = await asked
    assert [record.score.value for record in records if record.score] == [1.0, 0.5]
    assert {record.final_answer for record in records} == {"1"}
    assert {record.split for record in records} == {"eval"}
    assert await statuses(store) == set()
