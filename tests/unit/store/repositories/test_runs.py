"""The run document, published weights, processes, progress and views."""

from typing import Any

import pytest
from support.stored import claim, fill, make_task, play

from agentrl.errors import ConfigError, LeaseLost, RunDropped, StoreError
from agentrl.schema import Control, InferenceService, Policy, Run, SamplerInfo
from agentrl.store import TrajectoryStore


def policy(version: int, checksum: str = "c") -> Policy:
    return Policy(version=version, path=f"/p/{version}", checksum=checksum, num_bytes=9)


async def test_a_run_is_created_once_and_found_again_untouched(store: TrajectoryStore) -> None:
    assert await store.runs.get() is None
    first = await store.runs.create(Run(name="run", config={"seed": 1, "a.b": {"$c": None}}))
    again = await store.runs.create(Run(name="run", config={"seed": 2}))
    assert again == first == await store.runs.get()
    with pytest.raises(StoreError, match="contains run 'run', not 'other'"):
        await store.runs.create(Run(name="other"))


async def test_controls_change_on_the_running_run(store: TrajectoryStore) -> None:
    with pytest.raises(StoreError, match="contains no run yet"):
        await store.runs.update_control(sampling_paused=True)
    before = await store.runs.create(Run(name="run"))
    run = await store.runs.update_control(sampling_paused=True, max_staleness=3)
    assert run.control == Control(sampling_paused=True, max_staleness=3)
    assert run.updated_at >= before.updated_at
    assert (await store.runs.set_admission(12)).admitted_groups == 12
    assert (await store.runs.set_status("training")).status == "training"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_stalenes": 1}, "unknown control 'max_stalenes'; known: sampling_paused"),
        ({"max_staleness": "two"}, "max_staleness"),
    ],
)
async def test_wrong_controls_are_refused(
    store: TrajectoryStore, changes: dict[str, Any], message: str
) -> None:
    run = await store.runs.create(Run(name="run"))
    with pytest.raises(ConfigError, match=message):
        await store.runs.update_control(**changes)
    assert await store.runs.get() == run


async def test_the_latest_policy_is_the_one_that_servers_should_serve(
    store: TrajectoryStore,
) -> None:
    assert await store.policies.latest() is None
    with pytest.raises(StoreError, match="contains no run yet"):
        await store.policies.publish(policy(0))
    await store.runs.create(Run(name="run"))
    for version in range(4):
        await store.policies.publish(policy(version))
    latest = await store.policies.latest()
    assert latest is not None
    assert latest.version == 3
    # A trainer that resumed from the checkpoint of step 2 publishes version 2 anew; 3 is lost.
    await store.policies.publish(policy(2, "anew"))
    assert [(p.version, p.checksum) for p in await store.policies.all()] == [
        (0, "c"),
        (1, "c"),
        (2, "anew"),
        (3, "c"),
    ]
    run = await store.runs.get()
    assert run is not None
    assert run.policy_version == 2


async def test_policy_is_held_for_as_long_as_somebody_asked(store: TrajectoryStore) -> None:
    assert await store.policies.hold_latest(60) is None
    await store.runs.create(Run(name="run"))
    for version in range(3):
        await store.policies.publish(policy(version))
    assert await store.policies.held_versions() == set()
    held = await store.policies.hold_latest(60)
    assert held is not None
    assert held.version == 2
    # A shorter wish of another server takes nothing from it.
    await store.policies.hold_latest(0)
    await store.policies.publish(policy(3))
    assert await store.policies.held_versions() == {2}
    await store.policies.hold_latest(0)
    assert await store.policies.held_versions() == {2}


async def test_policy_that_is_overtaken_while_it_is_being_held_is_not_returned(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.runs.create(Run(name="run"))
    await store.policies.publish(policy(0))
    read = store.policies.latest
    answers = iter([await read()])

    async def late() -> Policy | None:
        """Answer once with what was the latest, while the next one is being published."""
        for old in answers:
            await store.policies.publish(policy(1))
            return old
        return await read()

    monkeypatch.setattr(store.policies, "latest", late)
    held = await store.policies.hold_latest(60)
    assert held is not None
    assert held.version == 1
    assert await store.policies.held_versions() == {0, 1}


async def test_servers_register_report_and_are_set_from_outside(store: TrajectoryStore) -> None:
    service = InferenceService(id="s1", base_url="http://h:1", backend="embedded", model_path="m")
    with pytest.raises(StoreError, match="'s1' is not registered"):
        await store.services.heartbeat("s1")
    await store.services.register(service)
    down = await store.services.set_status("s1", status="down", error="update failed")
    assert (down.status, down.error, down.heartbeat_at) == (
        "down",
        "update failed",
        service.heartbeat_at,
    )
    beat = await store.services.heartbeat("s1")
    assert (beat.status, beat.error) == ("down", "update failed")
    assert beat.heartbeat_at >= service.heartbeat_at
    up = await store.services.set_status("s1", status="up", policy_version=4)
    assert (up.status, up.policy_version, up.error) == ("up", 4, None)
    assert await store.services.all() == await store.services.all(alive_within=60)
    await store.database["inference_services"].update_one(
        {}, {"$currentDate": {"heartbeat_at": True}}
    )
    assert await store.services.all(alive_within=-1) == []


async def test_samplers_report_themselves(store: TrajectoryStore) -> None:
    info = SamplerInfo(id="h:1:x", host="h", pid=1)
    await store.samplers.register(info)
    await store.samplers.heartbeat(
        info.model_copy(update={"num_running": 3, "seconds_waiting": {"no_task": 1.5}})
    )
    (read,) = await store.samplers.all()
    assert (read.num_running, read.seconds_waiting) == (3, {"no_task": 1.5})
    assert read.started_at == info.started_at
    await store.samplers.heartbeat(SamplerInfo(id="h:2:y", host="h", pid=2, num_output_tokens=5))
    assert [sampler.id for sampler in await store.samplers.all()] == ["h:1:x", "h:2:y"]


async def test_progress_counts_what_is_there(store: TrajectoryStore) -> None:
    with pytest.raises(StoreError, match="contains no run yet"):
        await store.reports.progress()
    await store.runs.create(Run(name="run", admitted_groups=7))
    record_ids = await fill(store, 3)
    await store.tasks.add([make_task(3, num_generations=4), make_task(0, split="eval")])
    await play(store, await claim(store), score=None)
    await claim(store)
    await store.ledger.reserve("trainer", record_ids[:2], 1)
    await store.ledger.commit("trainer", 1)
    await store.samplers.heartbeat(SamplerInfo(id="x", host="h", pid=2, num_output_tokens=50))
    progress = await store.reports.progress()
    assert progress.records == {"pending": 4, "scored": 6}
    assert progress.eval_records == {"finished": 1, "running": 1}
    assert (progress.num_groups, progress.num_groups_completed) == (4, 3)
    assert (progress.num_groups_ready, progress.num_groups_consumed) == (2, 1)
    assert (progress.admitted_groups, progress.policy_version) == (7, 0)
    assert (progress.num_samplers, progress.num_output_tokens) == (1, 50)


async def test_views_show_a_person_what_happened(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0)])
    await play(store, await claim(store), num_turns=3, version=2)
    record = await claim(store)
    await store.records.fail_attempt(record.id, record.fence, "tools are down", 3)
    (row,) = await store.database["v_trajectories"].find({"score.value": 1.0}).to_list()
    assert row["question"] == "What does item 0 cost?"
    assert [turn["text"] for turn in row["turns"]] == ["<answer>4</answer>"] * 3
    assert [turn["versions"] for turn in row["turns"]] == [[2]] * 3
    assert not any(isinstance(v, bytes) for turn in row["turns"] for v in turn.values())
    (group,) = await store.database["v_progress"].find().to_list()
    assert (group["mean_score"], group["num_tries"]) == (1.0, 2)
    (failure,) = await store.database["v_failures"].find().to_list()
    assert (failure["_id"], failure["error"]) == ("train/0/q0/1", "tools are down")


async def test_a_dropped_database_is_not_told_as_a_stolen_lease(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name="run"))
    await store.trainer_leases.acquire("trainer", "host:1:a", 30)
    leases = store.trainer_leases
    await store.drop_database()
    for work in (leases.renew("trainer", 30), leases.check("trainer"), leases.release("trainer")):
        with pytest.raises(
            RunDropped, match=f"the run in database '{store.database_name}' is gone"
        ):
            await work


async def test_a_device_is_a_live_trainers_alone(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name="run"))
    with pytest.raises(LeaseLost):
        await store.trainer_leases.set_has_device(True)
    assert not await store.trainer_leases.holder_has_device()
    await store.trainer_leases.acquire("trainer", "host:1:a", 30)
    assert not await store.trainer_leases.holder_has_device()
    await store.trainer_leases.set_has_device(True)
    assert await store.trainer_leases.holder_has_device()
    await store.trainer_leases.release("trainer")  # as when it died and its lease ran out
    assert not await store.trainer_leases.holder_has_device()
