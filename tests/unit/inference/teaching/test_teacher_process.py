"""A process of a teacher is seen from its start to its end."""

import asyncio
import socket

import pytest
from support.stored import fill

from agentrl.config.sections import RootConfig
from agentrl.inference.teaching.teacher_process import (
    TeacherPlan,
    TeachingSettings,
    run_teachers,
)
from agentrl.schema import Run
from agentrl.store import TrajectoryStore


async def test_a_teacher_whose_server_is_still_loading_is_alive(store: TrajectoryStore) -> None:
    await fill(store, 1)
    await store.runs.create(
        Run(name=store.database_name, status="training", config={"teachers": ["big"]})
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        plan = TeacherPlan("big", f"http://127.0.0.1:{silent.getsockname()[1]}")
        teaching = asyncio.create_task(
            run_teachers(RootConfig(), store, [plan], TeachingSettings())
        )
        while (await store.reports.progress()).untaught[0].process is None:
            assert not teaching.done()
            await asyncio.sleep(0.02)
        teaching.cancel()
        await asyncio.wait([teaching])
    assert (await store.reports.progress()).untaught[0].process is None


async def test_a_teacher_waits_for_a_run_that_starts_later(
    store: TrajectoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(store, 1)
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level("INFO"):
        plan = TeacherPlan("big", f"http://127.0.0.1:{silent.getsockname()[1]}")
        teaching = asyncio.create_task(
            run_teachers(RootConfig(), store, [plan], TeachingSettings())
        )
        while "waiting: the run has not started" not in caplog.messages:
            assert not teaching.done()
            await asyncio.sleep(0.02)
        await store.runs.create(
            Run(name=store.database_name, status="training", config={"teachers": ["big"]})
        )
        while (await store.reports.progress()).untaught[0].process is None:
            assert not teaching.done()
            await asyncio.sleep(0.02)
        teaching.cancel()
        await asyncio.wait([teaching])
    assert caplog.messages.count("waiting: the run has not started") == 1
