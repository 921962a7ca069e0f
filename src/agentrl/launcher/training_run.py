"""`agentrl run`: a whole training run on this machine, from its checks to its report."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from rich.console import Console

from agentrl.config.sections import RootConfig, TrainerSection
from agentrl.errors import AgentRLError, ConfigError, NothingToLearn, StoreError
from agentrl.launcher.checks.preflight import (
    check_has_questions,
    check_name_is_free,
    full_disk_reported,
)
from agentrl.launcher.checks.question_checks import check_unchanged
from agentrl.launcher.cluster.gpu_placement import GpuMap
from agentrl.launcher.cluster.local_cluster import LocalCluster, until_interrupted
from agentrl.launcher.cluster.recovery import last_error
from agentrl.launcher.cluster.resume_checks import (
    changes_since,
    check_checkpoints,
    check_no_trainer,
    check_not_running,
    check_owner,
)
from agentrl.launcher.console.progress_display import ProgressDisplay
from agentrl.launcher.console.run_report import (
    add_to_summary,
    finished,
    interrupted,
    print_inspection_commands,
    print_locations,
    print_missing_scores,
    report_if_slow,
    run_console,
    say,
)
from agentrl.launcher.start import announced_start
from agentrl.plugin_registry import hooks, imported
from agentrl.runtime.ending_tasks import end_tasks, joint_tasks
from agentrl.runtime.processes.child_processes import Child
from agentrl.runtime.processes.signals import INTERRUPTED, NO_SIGNAL
from agentrl.schema import ENDED_RUNS
from agentrl.store import TrajectoryStore

Preparation = Callable[[Console, RootConfig, GpuMap], Coroutine[Any, Any, RootConfig | None]]
"""Work before the processes of a run start; returns the configuration to run with, or None if a
signal stopped it."""

_ALIVE_SECONDS = 3.0
"""Age of a server's last heartbeat; older ones are those of an earlier start."""
_POLL_SECONDS = 0.2


async def run_training(config: RootConfig) -> int:
    """Start everything, show progress, stop everything; return the exit status.

    Ctrl-C and SIGTERM stop the children and keep all data: the same command resumes the run.
    """
    check_not_running(config)
    console = run_console()
    prepared = await _prepared(console, config)
    if prepared is None:
        say(console, "interrupted; the same command goes on")
        return INTERRUPTED
    config, gpus = prepared
    started = time.monotonic()
    async with full_disk_reported(config), LocalCluster(config, gpus=gpus) as cluster:
        store = await _opened_store(console, cluster)
        done = await already_done(config.trainer, store)
        if done is not None:
            say(console, done)
            print_locations(console, config, store)
            return 0
        await store.runs.reopen()
        await store.runs.set_phase("starting")
        try:
            status = await until_interrupted(_train(console, cluster, store))
        except NothingToLearn:
            await store.runs.set_status("no_signal")
            add_to_summary(config.run.output_path, {"status": "no_signal"})
            raise
        finally:
            restarts = dict(sorted(cluster.num_restarts.items()))
            add_to_summary(config.run.output_path, {"restarts": restarts})
        if status is None or status == INTERRUPTED:
            run = None
            await cluster.stop_trainer()  # it may save one more step
            with suppress(StoreError):
                run = await store.runs.get()
                await store.runs.set_phase("interrupted")
            say(console, interrupted(time.monotonic() - started, run))
            print_inspection_commands(console, config)
            return INTERRUPTED
        seconds = time.monotonic() - started
        if status == NO_SIGNAL:
            signal = await store.reports.signal()
            say(
                console,
                f"ended after {seconds:.0f} s: {signal.num_kept} of {signal.num_groups} groups could "
                f"be trained on, so that the model has learned nothing; {signal}",
            )
        else:
            say(console, finished(config, seconds))
        await print_missing_scores(console, config, store)
        print_locations(console, config, store)
        return status


@asynccontextmanager
async def beside_own_loop(config: RootConfig) -> AsyncIterator[RootConfig]:
    """Check everything and start all processes but the trainer, which is the caller."""
    check_not_running(config)
    console = run_console()
    prepared = await _prepared(console, config)
    if prepared is None:
        raise KeyboardInterrupt
    config, gpus = prepared
    os.environ.update(gpus.environment(gpus.trainer))
    async with full_disk_reported(config), LocalCluster(config, gpus=gpus) as cluster:
        store = await _opened_store(console, cluster)
        await store.runs.reopen()
        await store.runs.set_phase("starting")
        await _start_sampling(console, cluster, store)
        say(console, f"logs in {config.run.logs_dir}/")
        async with joint_tasks() as tasks:
            watching = tasks.create_task(cluster.watch(asyncio.Event().wait()))
            yield cluster.config
            watching.cancel()
        run = await store.runs.get()
        if run is not None and run.status in ENDED_RUNS:
            await cluster.wait_for_samplers()
        print_locations(console, cluster.config, store)


async def _opened_store(console: Console, cluster: LocalCluster) -> TrajectoryStore:
    """Open the run's database, and check that this run may go on in it."""
    config = cluster.config
    store = await cluster.open_store()
    if config.run.fresh:
        await check_name_is_free(config.run, store)
    await check_no_trainer(config, store)
    check_owner(config, await store.runs.get())
    missing_note = await check_checkpoints(config, store)
    for note in (
        *([] if missing_note is None else [missing_note]),
        *changes_since(config, await store.runs.get()),
    ):
        say(console, f"note: {note}")
    await check_has_questions(config.data, store)
    for note in await check_unchanged(config.data, store):
        say(console, f"note: {note}")
    return store


async def _prepared(console: Console, config: RootConfig) -> tuple[RootConfig, GpuMap] | None:
    """Check everything, fill in the defaults that fit, and let plugins prepare the run.

    Returns:
        The configuration of the run, and its GPUs; None if a signal stopped the preparation.
    """
    preparations = [one for one in _preparations(config) if one is not None]
    start = await announced_start(console, config)
    config, gpus = start.config, start.gpus
    for preparation in preparations:
        prepared = await until_interrupted(preparation(console, config, gpus))
        if prepared is None:
            return None
        config = prepared
    return config, gpus


def _preparations(config: RootConfig) -> Iterator[Preparation | None]:
    """Yield what plugins have to do before the run; None of those with nothing to do."""
    for target in hooks("run_preparations").values():
        yield imported(target)(config)


async def _start_sampling(console: Console, cluster: LocalCluster, store: TrajectoryStore) -> None:
    config = cluster.config
    say(console, f"run {config.run.run_name}: database {store.redacted_uri}")
    if config.rollout.enable_sampling:
        async with report_if_slow(console, "waiting for the tool server ..."):
            await cluster.start_tool_server()
        cluster.write_config()
        await cluster.start_servers()
        if config.inference.share_gpus:
            # SGLang measures the free memory at its start; the trainer would change it meanwhile.
            async with report_if_slow(console, "waiting for the servers ..."):
                await cluster.watch(_until_servers_are_up(cluster, store))
        await cluster.start_samplers()
    else:
        cluster.write_config()


async def _train(console: Console, cluster: LocalCluster, store: TrajectoryStore) -> int:
    config = cluster.config
    await _start_sampling(console, cluster, store)
    trainer = await cluster.start_trainer()
    say(console, f"logs in {config.run.logs_dir}/, the trainer's is {trainer.log_path}")
    display = ProgressDisplay(console, store, config, lambda: cluster.num_restarts)
    follower = asyncio.create_task(display.follow())
    try:
        status = await _until_trained(cluster, trainer, display)
        # Wait for one more update, so that the last step is shown.
        await asyncio.sleep(0.6)
    finally:
        await end_tasks([follower])
        if not follower.cancelled():
            follower.result()
    if status == INTERRUPTED:
        return status
    run = await store.runs.get()
    # `accelerate launch` exits with its own status, so the trainer's status is read from the
    # database.
    if status != 0 and run is not None and run.status == "no_signal":
        status = NO_SIGNAL
    elif status != 0:
        raise AgentRLError(
            f"the trainer failed (exit {status}); last lines of {trainer.log_path}: "
            f"{last_error(trainer)}"
        )
    elif trainer.has_failed:
        step = 0 if run is None else run.step
        raise AgentRLError(
            f"the trainer exited with status 0 after step {step} of {config.trainer.max_steps}, and "
            "the run is not complete; a function of yours or a library called exit in it; last "
            f"lines of {trainer.log_path}: {last_error(trainer)}"
        )
    if config.rollout.enable_sampling:
        await cluster.wait_for_samplers()
    return status


async def _until_servers_are_up(cluster: LocalCluster, store: TrajectoryStore) -> None:
    num_up = 0
    while num_up < cluster.config.inference.num_inference_servers:
        await asyncio.sleep(_POLL_SECONDS)
        services = await store.services.all(alive_within=_ALIVE_SECONDS)
        num_up = sum(service.status == "up" for service in services)


async def _until_trained(cluster: LocalCluster, trainer: Child, display: ProgressDisplay) -> int:
    """Wait for the trainer to exit, and return its exit status."""
    waiting = asyncio.create_task(cluster.wait(trainer.name))
    try:
        if cluster.config.rollout.require_signal:
            either: set[asyncio.Future[Any]] = {waiting, display.first_answers}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() and display.first_answers.result().lacks_signal:
                # The trainer writes its summary when it stops, and would overwrite this result.
                await cluster.stop_trainer()
                raise NothingToLearn(
                    "--require_signal: the first answers give nothing to learn from (see above); "
                    "the same command with other flags goes on"
                )
        return await waiting
    finally:
        waiting.cancel()


async def already_done(trainer: TrainerSection, store: TrajectoryStore) -> str | None:
    """Return a message that the run is complete, or None if work remains."""
    run = await store.runs.get()
    if run is not None and run.step > trainer.max_steps:
        raise ConfigError(
            f"--max_steps {trainer.max_steps}: run {run.name!r} is already at step "
            f"{run.step}; use --max_steps {run.step + 1} or more to continue, "
            "or another --run_name"
        )
    if run is None or run.status != "completed" or run.step < trainer.max_steps:
        return None
    return (
        f"run {run.name!r} is already at step {run.step} of --max_steps "
        f"{trainer.max_steps}; use --max_steps {run.step + 1} or more to continue, or "
        "another --run_name"
    )
