"""`agentrl run` on machines other than machine 0: their share of the trainer's ranks.

Machine 0 starts everything else and makes all decisions (`training_run`). Log files are the only
files of the run that are written here.
"""

import asyncio
import socket
import time
from pathlib import Path

from rich.console import Console

from agentrl.config.loading import MACHINE_ENVIRONMENT, load_config
from agentrl.config.sections import RootConfig, TrainerSection
from agentrl.config.validation.rank_checks import check_machines
from agentrl.errors import AgentRLError, ConfigError
from agentrl.launcher.checks.preflight import check_ranks
from agentrl.launcher.cluster.child_errors import last_error
from agentrl.launcher.cluster.gpu_placement import placed
from agentrl.launcher.cluster.local_cluster import LocalCluster, until_interrupted
from agentrl.launcher.console.run_console import run_console
from agentrl.launcher.console.run_report import print_gpus
from agentrl.launcher.model_limits import FITTED_OF_TRAINER
from agentrl.launcher.training_run import already_done
from agentrl.runtime.processes.signals import INTERRUPTED

# The time that torch waits for the last machine.
_FIRST_MACHINE_SECONDS = 900.0
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.5
# Network file systems show new files with a delay.
_FILE_SECONDS = 60.0
_MACHINE_FLAGS = {*MACHINE_ENVIRONMENT, "trainer_gpus"}


async def join_training(config: RootConfig) -> int:
    """Wait for machine 0 and train with it until it ends; return the exit status.

    Raises:
        AgentRLError: a mistake of the user (before anything starts), machine 0 did not start, or
            the ranks failed.
    """
    check_machines(config)
    config, gpus = placed(config)
    await check_ranks(config)
    console = run_console()
    print_gpus(console, gpus)
    started = time.monotonic()
    async with LocalCluster(config, gpus=gpus) as cluster:
        store = await cluster.open_store()
        done = None if config.run.fresh else await already_done(config.trainer, store)
        if done is not None:
            console.print(done)
            return 0
        status = await until_interrupted(_train(console, cluster))
    seconds = time.monotonic() - started
    if status is None:
        console.print(
            f"interrupted after {seconds:.0f} s; the ranks of this machine have ended, and the "
            "same command on all machines resumes the run"
        )
        return INTERRUPTED
    console.print(f"the trainer ended after {seconds:.0f} s; see machine 0 for the result")
    return 0


async def _train(console: Console, cluster: LocalCluster) -> int:
    config, trainer = cluster.config, cluster.config.trainer
    address = f"{trainer.main_process_ip}:{trainer.main_process_port}"
    console.print(
        f"run [bold]{config.run.run_name}[/]: machine {trainer.machine_rank} of "
        f"{trainer.num_machines}, waiting for machine 0 at {address}",
        highlight=False,
        soft_wrap=True,
    )
    await wait_for_first(trainer)
    await check_same_flags(config, cluster.config_path)
    ranks = await cluster.start_trainer()
    console.print(
        f"training with {trainer.num_processes // trainer.num_machines} of "
        f"{trainer.num_processes} ranks; logs in {config.run.logs_dir}/, the first is "
        f"{ranks.log_path}",
        highlight=False,
        soft_wrap=True,
    )
    status = await cluster.wait(ranks.name)
    if status != 0:
        raise AgentRLError(
            f"the trainer failed (exit {status}), see machine 0; last lines of {ranks.log_path}: "
            f"{last_error(ranks)}"
        )
    return status


async def wait_for_first(
    trainer: TrainerSection, *, timeout_seconds: float = _FIRST_MACHINE_SECONDS
) -> None:
    """Return when machine 0 listens for the other machines' ranks.

    Raises:
        ConfigError: its address cannot be resolved.
        AgentRLError: it did not listen in time.
    """
    host, port = trainer.main_process_ip, trainer.main_process_port
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(host, port)
        except (socket.gaierror, UnicodeError) as error:
            raise ConfigError(f"--main_process_ip {host} is not a valid address: {error}") from None
        except OSError as error:  # TimeoutError is one
            if time.monotonic() > deadline:
                raise AgentRLError(
                    f"machine 0 did not start training within {timeout_seconds:.0f} s: "
                    f"{host}:{port} does not respond ({type(error).__name__}); start it, or "
                    "correct --main_process_ip and --main_process_port"
                ) from None
            await asyncio.sleep(_POLL_SECONDS)
        else:
            writer.close()
            return


async def check_same_flags(
    config: RootConfig, path: Path, *, timeout_seconds: float = _FILE_SECONDS
) -> None:
    """Reject ranks whose flags differ from those of machine 0.

    Args:
        config: the configuration of this machine.
        path: the configuration that machine 0 wrote before it started to listen.
        timeout_seconds: how long to wait for the file to appear on this machine.

    Raises:
        ConfigError: the file is not visible here, or it differs.
    """
    deadline = time.monotonic() + timeout_seconds
    while not await asyncio.to_thread(path.exists):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{path}, written by machine 0, is not visible here: --output_dir must be a "
                "directory shared by all machines under the same path"
            )
        await asyncio.sleep(_POLL_SECONDS)
    first = load_config({"config": path})
    for mine, theirs in (
        (config.model, first.model),
        (config.algorithm, first.algorithm),
        (config.trainer, first.trainer),
    ):
        for name, value in mine:
            other = getattr(theirs, name)
            is_fitted = name in FITTED_OF_TRAINER and name not in mine.model_fields_set
            if name not in _MACHINE_FLAGS and not is_fitted and value != other:
                raise ConfigError(
                    f"--{name} is {value} here and {other} on machine 0; start all machines with "
                    "the same flags"
                )
