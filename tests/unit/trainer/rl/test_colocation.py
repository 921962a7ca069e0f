"""Turns on one device: what is told to servers and supervisors when, and that nothing else changes."""

import asyncio
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.control_server import serve
from support.doc_blocks import DOCS
from support.training import MakeConfig, Player, train_tasks
from torch.optim import AdamW

from agentrl.config.command_line import parse_flags
from agentrl.config.shared_gpus import shortage_of
from agentrl.distributed import HostMemory, Ranks
from agentrl.errors import TrainingError
from agentrl.models.load import load_policy
from agentrl.models.policy import PolicyModel
from agentrl.schema import InferenceService, Run
from agentrl.store import TrajectoryStore
from agentrl.trainer.bootstrap import Shares, WorkerGroup, mesh_shape
from agentrl.trainer.learner.learner import Learner
from agentrl.trainer.learner.optimizer import move_state
from agentrl.trainer.rl.run_versions import beside_servers
from agentrl.trainer.rl.training_loop import lead

Trained = tuple[PolicyModel, AdamW]


@pytest.fixture
def trained(model_path: Path) -> Trained:
    """A policy whose optimizer has made a step."""
    policy = load_policy(model_path)
    optimizer = AdamW(policy.parameters(), lr=0.1)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return policy, optimizer


def test_nothing_of_the_trainer_stays_behind(trained: Trained) -> None:
    policy, optimizer = trained
    # No device that holds data is sure to be here; what is moved to this one is seen all the same.
    move_state([policy], optimizer, torch.device("meta"), HostMemory())
    assert {p.device.type for p in policy.parameters()} == {"meta"}
    states = optimizer.state.values()
    assert {state[name].device.type for state in states for name in ("exp_avg", "exp_avg_sq")} == {
        "meta"
    }
    assert {state["step"].device.type for state in states} == {"cpu"}


def test_moving_to_where_it_is_copies_nothing(trained: Trained) -> None:
    policy, optimizer = trained
    before = [p.data_ptr() for p in policy.parameters()]
    before += [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
    move_state([policy], optimizer, torch.device("cpu"), HostMemory())
    after = [p.data_ptr() for p in policy.parameters()]
    after += [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
    assert after == before


def test_the_command_of_the_page_is_one_that_is_taken() -> None:
    page = (DOCS / "colocated.md").read_text()
    block = page.partition("```bash\n")[2].partition("```")[0].replace("\\\n", " ")
    program, command, *flags = shlex.split(block)
    assert (program, command) == ("agentrl", "run")
    config = parse_flags(flags)
    assert config.inference.colocated
    mesh_shape(config.trainer, config.trainer.num_processes)


async def test_servers_sleep_while_the_trainer_computes_and_wake_on_its_weights(
    make_config: MakeConfig,
    store: TrajectoryStore,
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    # The tasks there are have been played, so that the run ends with them.
    await store.tasks.add(train_tasks(4, 3))
    await Player(model_path).play_groups(store, [[1.0, 0.0, 0.0]] * 4)
    seen: list[tuple[Any, ...]] = []
    forward_backward, move = WorkerGroup.forward_backward, WorkerGroup.move

    async def note(what: str) -> None:
        statuses = {service.status for service in await store.services.all()}
        seen.append((what, *statuses, await store.trainer_leases.holder_has_device()))

    async def noting_passes(team: WorkerGroup, shares: Shares, *settings: Any) -> float:
        await note("train")
        return await forward_backward(team, shares, *settings)

    async def noting_move(team: WorkerGroup, *, to_device: bool) -> None:
        await note("to device" if to_device else "to host")
        await move(team, to_device=to_device)

    monkeypatch.setattr(WorkerGroup, "forward_backward", noting_passes)
    monkeypatch.setattr(WorkerGroup, "move", noting_move)
    async with serve() as control:
        await store.runs.create(Run(name=store.database_name))
        await store.services.register(
            InferenceService(id="s", base_url=control.base_url, backend="embedded", model_path="m")
        )
        config = make_config(colocated="true", enable_sampling="true")
        result = await lead(config, Ranks(), stop=asyncio.Event())
    assert (result.status, result.step) == ("completed", 2)
    turn = [("to device", "asleep", True), ("train", "asleep", True), ("to host", "asleep", True)]
    assert seen == turn * 2
    (service,) = await store.services.all()
    assert (service.status, service.policy_version) == ("up", 2)
    assert not await store.trainer_leases.holder_has_device()
    sleeping = ["pause_generation", "flush_cache", "release_memory_occupation"]
    waking = [
        *("resume_memory_occupation", "update_weights_from_disk", "resume_memory_occupation"),
        "continue_generation",
    ]
    first = ["pause_generation", "update_weights_from_disk", "continue_generation"]
    assert control.names() == first + (sleeping + waking) * 2
    # The same run with a device for each makes the same weights.
    await store.drop_database()
    await store.ensure_schema()
    await store.tasks.add(train_tasks(4, 3))
    await Player(model_path).play_groups(store, [[1.0, 0.0, 0.0]] * 4)
    alone = make_config(output_dir=tmp_path / "alone")
    await lead(alone, Ranks(), stop=asyncio.Event())
    ours, theirs = (
        load_file(folder / "policy/000002/model.safetensors")
        for folder in (result.output_path, tmp_path / "alone")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


async def test_a_trainer_without_memory_beside_a_server_ends_and_takes_turns_next(
    make_config: MakeConfig,
    store: TrajectoryStore,
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await store.tasks.add(train_tasks(4, 3))
    await Player(model_path).play_groups(store, [[1.0, 0.0, 0.0]] * 4)

    def exhausted(*_: object, **__: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    steps: Iterator[Callable[..., float]] = iter([Learner.forward_backward, exhausted])
    monkeypatch.setattr(
        Learner, "forward_backward", lambda *args, **settings: next(steps)(*args, **settings)
    )
    async with serve() as control:
        await store.runs.create(Run(name=store.database_name))
        await store.services.register(
            InferenceService(id="s", base_url=control.base_url, backend="sglang", model_path="m")
        )
        flags = {"inference_backend": "sglang", "enable_sampling": "true"}
        config = make_config(share_gpus="true", inf_mem_ratio=0.4, **flags)
        with (
            pytest.raises(
                TrainingError,
                match=r"out of GPU memory .*CUDA out of memory. Tried to allocate 2.00 GiB; .*--colocated",
            ) as caught,
            beside_servers(config),
        ):
            await lead(config, Ranks(), stop=asyncio.Event())
        (service,) = await store.services.all()
        assert (service.status, service.policy_version) == ("up", 1)
        assert not {"release_memory_occupation", "flush_cache"} & set(control.names())
        shortage = shortage_of(config.run.output_path)
        monkeypatch.undo()
        turns = make_config(colocated="true", **flags)
        result = await lead(turns, Ranks(), stop=asyncio.Event())
    assert "\n" not in str(caught.value)
    assert shortage is not None
    assert (result.status, result.step) == ("completed", 2)


@pytest.mark.parametrize(("flag", "limits"), [("share_gpus", [(0.5, 1)]), ("colocated", [])])
def test_a_trainer_beside_a_server_leaves_it_its_part_of_the_gpu(
    flag: str, limits: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: seen.append(given)
    )
    monkeypatch.setenv("LOCAL_RANK", "1")
    flags = ["--inference_backend", "sglang", f"--{flag}", "--inf_mem_ratio", "0.4"]
    with beside_servers(parse_flags(flags)):
        assert [(round(fraction, 6), rank) for fraction, rank in seen] == limits
