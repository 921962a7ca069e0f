"""`agentrl run`: a whole training run, but for the trainer's ranks on other machines."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any

from rich.console import Console

from agentrl.config.checks import check_machines
from agentrl.config.sections import RootConfig
from agentrl.errors import AgentRLError
from agentrl.launcher.display import Display
from agentrl.launcher.local_cluster import Stage
from agentrl.launcher.preflight import check_has_questions, check_inputs, check_name_is_free
from agentrl.launcher.run_report import last_error, print_places
from agentrl.runtime.signals import INTERRUPTED, stop_on_signals
from agentrl.store import TrajectoryStore


async def run_training(config: RootConfig) -> int:
    """Start everything, show progress, end everything; return the exit status.

    Ctrl-C and SIGTERM end the children and leave all data: the same command resumes the run.

    Raises:
        AgentRLError: a mistake of the user (before anything starts), or a child that failed.
    """
    check_machines(config)
    await check_inputs(config)
    console = Console()
    started = time.monotonic()
    async with Stage(config) as stage:
        store = await stage.open_store()
        if config.run.fresh:
            await check_name_is_free(stage.config, store)
        await check_has_questions(config, store)
        done = await already_done(config, store)
        if done is not None:
            console.print(done)
            print_places(console, stage.config, store)
            return 0
        status = await until_interrupted(_train(console, stage, store))
        if status in (None, INTERRUPTED):
            console.print(
                f"interrupted after {time.monotonic() - started:.0f} s; "
                "all data are kept, and the same command resumes the run"
            )
            return INTERRUPTED
        console.print(f"finished in {time.monotonic() - started:.0f} s")
        print_places(console, stage.config, store)
        return 0


async def _train(console: Console, stage: Stage, store: TrajectoryStore) -> int:
    config = stage.config
    console.print(f"run [bold]{config.run.run_name}[/]: database {store.redacted_uri}")
    if config.rollout.enable_sampling:
        await stage.start_tool_server()
        stage.write_config()
        await stage.start_servers()
        await stage.start_samplers()
    else:
        stage.write_config()
    trainer = await stage.start_trainer()
    console.print(f"logs in {config.run.logs_dir}/, the trainer's is {trainer.log_path}")
    if config.trainer.num_machines > 1:
        console.print(
            f"machine 0 of {config.trainer.num_machines}: the trainer begins when the same command "
            "runs on the others",
            highlight=False,
            soft_wrap=True,
        )
    display = Display(
        console,
        store,
        metrics_path=config.run.output_path / "metrics.jsonl",
        max_steps=config.trainer.max_steps,
    )
    following = asyncio.create_task(display.follow())
    try:
        status = await stage.wait(trainer.name)
        # One more look, so that the last step is shown.
        await asyncio.sleep(0.6)
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    if status == INTERRUPTED:
        return status
    if status != 0:
        raise AgentRLError(
            f"the trainer failed (exit {status}); the end of {trainer.log_path} says: "
            f"{last_error(trainer)}"
        )
    if config.rollout.enable_sampling:
        await stage.let_samplers_end()
    return status


async def until_interrupted(work: Coroutine[Any, Any, int]) -> int | None:
    """Return the work's result, or None when SIGINT or SIGTERM came first.

    The next one ends the process at once, and with it, by the kernel, what it started.
    """
    working = asyncio.create_task(work)
    interrupted = stop_on_signals("all processes are ended first")
    waiting = asyncio.create_task(interrupted.wait())
    await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if working.done():
        return working.result()
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working
    return None


async def already_done(config: RootConfig, store: TrajectoryStore) -> str | None:
    """Say that there is nothing left to do, if so."""
    run = await store.runs.get()
    if run is None or run.status != "completed" or run.policy_version < config.trainer.max_steps:
        return None
    return (
        f"run {run.name!r} is complete ({run.policy_version} steps); raise --max_steps to go on, "
        "or choose another run name"
    )
