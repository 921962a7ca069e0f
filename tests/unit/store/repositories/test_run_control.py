"""Changing a running run: types, the audit trail, and what a restart leaves alone."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.errors import ConfigError
from agentrl.schema import Control, Run, RunStatus, utc_now
from agentrl.store import TrajectoryStore


async def test_every_change_leaves_who_when_and_what(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name="run"))
    await store.runs.update_control("ada@host", max_staleness=4, temperature=0.5)
    run = await store.runs.update_control("bob@host", temperature=None)
    assert run.control == Control(max_staleness=4)
    first, second = run.control_log
    assert (first.by, first.before, first.after) == (
        "ada@host",
        {"max_staleness": 1, "temperature": None},
        {"max_staleness": 4, "temperature": 0.5},
    )
    assert (second.by, second.before, second.after) == (
        "bob@host",
        {"temperature": 0.5},
        {"temperature": None},
    )
    assert abs(second.at - utc_now()) < timedelta(minutes=1)
    assert not await store.runs.audit_control()


async def test_every_step_has_the_configuration_of_its_start(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name="run"))
    flags = {"learning_rate": 0.1, "num_samplers": 2}
    starts = [
        (0, flags),
        (4, {**flags, "learning_rate": 0.2}),
        (6, {**flags, "learning_rate": 0.2}),
        (8, {**flags, "learning_rate": 0.3, "num_samplers": 1}),
        (7, {**flags, "learning_rate": 0.4, "num_samplers": 1}),  # step 8 was lost
    ]
    for last_step, config in starts:
        await store.runs.set_config(config, last_step)
    run = await store.runs.get()
    assert run is not None
    assert len(run.config_log) == 3
    rates = [run.config_at(step)["learning_rate"] for step in range(1, 10)]
    assert rates == [0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.4, 0.4]
    assert run.config_at(5)["num_samplers"] == 2


@pytest.mark.parametrize(
    ("status", "after"),
    [
        ("completed", "created"),
        ("no_signal", "created"),
        ("failed", "created"),
        ("training", "training"),
        ("created", "created"),
    ],
)
async def test_only_an_ended_run_is_reopened(
    store: TrajectoryStore, status: RunStatus, after: RunStatus
) -> None:
    await store.runs.create(Run(name="run", status=status))
    await store.runs.reopen()
    run = await store.runs.get()
    assert run is not None
    assert run.status == after


async def test_an_edit_in_the_database_is_noted_afterwards(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name="run"))
    await store.database["runs"].update_one({}, {"$set": {"control.sampling_paused": True}})
    assert await store.runs.audit_control()
    assert not await store.runs.audit_control()
    run = await store.runs.get()
    assert run is not None
    (change,) = run.control_log
    assert change.by == "an edit in the database"
    assert (change.before["sampling_paused"], change.after["sampling_paused"]) == (False, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_staleness": -1},
        {"groups_per_step": 0},
        {"concurrency": 1.5},
        {"sampling_paused": 1},
        {"top_p": 1.5},
        {"temperature": True},
        {"temperature": 1e9},
        {"temperature": float("nan")},
        {"repetition_penalty": 1e-9},
        {"scorer": "s" * 201},
    ],
)
async def test_values_of_the_wrong_type_or_range_change_nothing(
    store: TrajectoryStore, changes: dict[str, Any]
) -> None:
    run = await store.runs.create(Run(name="run"))
    with pytest.raises(ConfigError, match=next(iter(changes))):
        await store.runs.update_control(**changes)
    assert await store.runs.get() == run


@pytest.mark.parametrize("flags", [None, Control(max_staleness=3, groups_per_step=8)])
async def test_null_restores_the_value_of_the_start(
    store: TrajectoryStore, flags: Control | None
) -> None:
    await store.runs.create(Run(name="run", flag_control=flags))
    changes = {"max_staleness": 9, "groups_per_step": 9, "sampling_paused": True, "top_k": 5}
    await store.runs.update_control(**changes)
    run = await store.runs.update_control(**dict.fromkeys(changes))
    assert run.control == (flags or Control())


@pytest.mark.parametrize(
    ("edit", "problems"),
    [
        ({"$set": {"control.max_staleness": -5}}, 1),
        ({"$set": {"control.temperature": 1e9, "control.top_p": 0}}, 2),
        ({"$set": {"control.concurrency": None}}, 0),
        ({"$unset": {"control.max_staleness": ""}}, 0),
        ({"$unset": {"control": ""}}, 0),
    ],
)
async def test_a_bad_edit_in_the_database_is_named_and_the_value_of_the_start_applies(
    store: TrajectoryStore, edit: dict[str, Any], problems: int
) -> None:
    flags = Control(max_staleness=3, groups_per_step=8)
    await store.runs.create(Run(name="run", control=flags, flag_control=flags))
    await store.database["runs"].update_one({}, edit)
    run = await store.runs.set_status("training")
    for read in (run, await store.runs.get()):
        assert read is not None
        assert len(read.control_problems) == problems
        if "control" not in edit.get("$unset", {}):
            assert read.control == flags
    names = [problem.partition(":")[0] for problem in run.control_problems]
    mended = await store.runs.update_control("ada", **dict.fromkeys(names), sampling_paused=True)
    assert (mended.control_problems, mended.control.sampling_paused) == ((), True)
    assert not (await store.runs.apply_flags(flags)).control_problems


async def test_a_restart_takes_no_live_change_back(store: TrajectoryStore) -> None:
    flags = Control(max_staleness=1, groups_per_step=2)
    await store.runs.create(Run(name="run", control=flags, flag_control=flags))
    await store.runs.update_control(max_staleness=5)
    assert (await store.runs.apply_flags(flags)).control.max_staleness == 5
    changed = flags.model_copy(update={"groups_per_step": 3})
    run = await store.runs.apply_flags(changed)
    assert (run.control.max_staleness, run.control.groups_per_step) == (5, 3)
    assert run.control_log[-1].by == "flags of the trainer"
    assert (await store.runs.apply_flags(changed)).control == run.control


async def test_the_command_line_changes_a_run(
    store: TrajectoryStore, mongo_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await store.runs.create(Run(name=store.database_name))
    flags = ["--run_name", store.database_name, "--db_connection_string", mongo_uri]

    async def command(*words: str) -> int:
        return await asyncio.to_thread(main, ["store", "set", *words, *flags])

    assert await command("max_staleness", "3") == 0
    assert capsys.readouterr().out == f"{store.database_name}: max_staleness 1 -> 3\n"
    assert await command("max_stalenes", "3") == 2
    assert "unknown control 'max_stalenes'" in capsys.readouterr().err
    assert await command("max_staleness", "many") == 2
    assert "'many' is not JSON" in capsys.readouterr().err
    assert await command("max_staleness", "null") == 0
    assert capsys.readouterr().out == f"{store.database_name}: max_staleness 3 -> 1\n"
    assert await command("temperature", "1e9") == 2
    assert "temperature: Input should be less than or equal to 1000000" in capsys.readouterr().err
    assert await command("max_staleness", "3") == 0
    capsys.readouterr()
    assert await command("scorer", "exactly") == 2
    assert "exact" in capsys.readouterr().err
    assert await command("scorer", "math") == 0
    assert capsys.readouterr().out.endswith('scorer null -> "math"\n')
    run = await store.runs.get()
    assert run is not None
    assert (run.control.max_staleness, run.control.scorer) == (3, "math")
    assert "@" in run.control_log[0].by
