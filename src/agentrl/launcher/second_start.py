"""A start of a run that goes on already: refused in one line, which says where and since when.

In: the configuration and the store. A private mongod is told by the lock of its data, a run in a
database of the user's by its trainer's lease.
"""

from agentrl.config.sections import RootConfig
from agentrl.errors import StoreError
from agentrl.runtime.invocation import typed_command
from agentrl.runtime.process_identity import is_alive
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import serving
from agentrl.trainer.checkpoint import check_has_database, latest_checkpoint

LOOKS = tuple(f"`agentrl {command}" for command in ("inspect", "store", "tasks", "ui"))
"""What processes that serve a run's data without working on the run call themselves."""


def check_not_running(config: RootConfig) -> None:
    """Refuse to start a run whose private mongod another process serves; a short look is waited for.

    Raises:
        StoreError: the run is running; the text says since when, and where.
    """
    if config.store.db_connection_string is not None:
        return
    holder = serving(config.private_mongo_dir)
    if holder is not None and not holder.startswith(LOOKS):
        raise already_running(config.run.run_name, holder)


def already_running(run_name: str, holder: str) -> StoreError:
    """Return the error of a second start of a run."""
    if holder.startswith(LOOKS):
        return StoreError(
            f"the data of run {run_name!r} are in use by {holder}; end it first (`agentrl ui` ends its "
            "hold by itself half a minute after the last look)"
        )
    see = typed_command("inspect", "progress", "--follow", "--run_name", run_name)
    return StoreError(
        f"run {run_name!r} is already running: {holder}; look at it with {see}, or choose another "
        "--run_name"
    )


async def check_no_trainer(config: RootConfig, store: TrajectoryStore) -> None:
    """Refuse to start a run that a trainer of this machine trains, in a database of the user's.

    The trainer itself waits for the lease of one that it cannot see.

    Raises:
        StoreError: the run is running; the text says since when, and where.
    """
    for process in await store.reports.living():
        is_here = process.kind == "trainer" and is_alive(process.id)
        if is_here and process.consumer == config.trainer.consumer:
            host, pid, *_ = process.id.split(":")
            since = (
                "" if process.since is None else f", since {process.since:%Y-%m-%d %H:%M:%S} UTC"
            )
            raise already_running(
                config.run.run_name, f"its trainer on {host}, process {pid}{since}"
            )


async def look_at_files(config: RootConfig, store: TrajectoryStore) -> str | None:
    """Compare a run's checkpoints with its database; return a note where the checkpoints are gone.

    Raises:
        ConfigError: the database is gone.
    """
    checkpoint = latest_checkpoint(config.run.output_path)
    run = await store.runs.get()
    check_has_database(checkpoint, run)
    if checkpoint is not None or run is None or run.policy_version == 0:
        return None
    return (
        f"run {run.name!r} was at version {run.policy_version}, and {config.run.output_path} holds no "
        "checkpoint: it is trained again from the start, with the records that it has"
    )
