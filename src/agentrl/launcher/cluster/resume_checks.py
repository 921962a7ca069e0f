"""Second starts of a run: rejected while the run is active; changed flags are reported.

Input: the configuration and the store. Output: notes, or a one-line refusal that names the place
and start time of the live run. A run is detected by the lock on the data of its private mongod, or
by its trainer's lease in the user's database.
"""

from collections.abc import Iterator

from agentrl.config.flags import SETTINGS
from agentrl.config.loading import flat_values
from agentrl.config.sections import SECTIONS, RootConfig
from agentrl.errors import ConfigError, StoreError
from agentrl.runtime.installation import typed_command
from agentrl.runtime.processes.process_identity import is_alive, this_user
from agentrl.schema import Run
from agentrl.store import TrajectoryStore
from agentrl.store.mongod_folder import serving
from agentrl.trainer.checkpoint import check_has_database, checkpoint_paths
from agentrl.trainer.text_digests import text_digests

READER_COMMANDS = tuple(f"`agentrl {command}" for command in ("inspect", "store", "tasks", "ui"))
"""Prefixes of the names of processes that serve a run's data without working on the run."""

_LEARNING_SECTIONS = ("model", "data", "sampling", "rollout", "algorithm", "trainer")
"""Sections that define what is learned and how."""
_EXPECTED_CHANGES = frozenset({"max_steps", "num_train_epochs"})
"""Flags whose change is a reason to resume a run; they are not reported."""
_MAX_CHANGES = 6
_MAX_VALUE_CHARS = 60


def check_not_running(config: RootConfig) -> None:
    """Check that no other process works on a run's private mongod; wait for short readers."""
    if config.store.db_connection_string is not None:
        return
    holder = serving(config.private_mongo_dir)
    if holder is not None and not holder.startswith(READER_COMMANDS):
        raise already_running(config.run.run_name, holder)


def already_running(run_name: str, holder: str) -> StoreError:
    """Return the error of a second start of an active run."""
    if holder.startswith(READER_COMMANDS):
        return StoreError(
            f"the data of run {run_name!r} are in use by {holder}; stop it first (`agentrl ui` "
            "releases the data 30 s after its last request)"
        )
    command = typed_command("inspect", "progress", "--follow", "--run_name", run_name)
    return StoreError(
        f"run {run_name!r} is already running: {holder}; follow it with {command}, or choose another "
        "--run_name"
    )


async def check_no_trainer(config: RootConfig, store: TrajectoryStore) -> None:
    """Check that no trainer of this machine trains the run, in a database of the user.

    The new trainer itself waits for the lease of a trainer on another machine.
    """
    for process in await store.reports.live_processes():
        is_here = process.kind == "trainer" and is_alive(process.id)
        if is_here and process.consumer == config.trainer.consumer:
            host, pid, *_ = process.id.split(":")
            since = (
                "" if process.since is None else f", since {process.since:%Y-%m-%d %H:%M:%S} UTC"
            )
            raise already_running(
                config.run.run_name, f"its trainer on {host}, process {pid}{since}"
            )


def check_owner(config: RootConfig, run: Run | None) -> None:
    """Check that the run of a shared database is not another user's.

    A start that finds the run's checkpoints continues it, wherever it runs.
    """
    if run is None or not run.owner or run.is_imported or config.run.join:
        return
    is_shared = config.store.db_connection_string is not None
    if is_shared and run.owner != this_user() and not checkpoint_paths(config.run.output_path):
        raise ConfigError(
            f"run {run.name!r} of this database belongs to {run.owner}, and "
            f"{config.run.output_path} holds none of its checkpoints; use another --run_name, or "
            "--join to train it together"
        )


def changes_since(config: RootConfig, run: Run | None) -> list[str]:
    """Return a note on the flags that have changed since the run was started."""
    if run is None or not run.config:
        return []
    before, now = run.config, flat_values(config)
    name = f"run {run.name!r}"
    if bool(before.get("lora_rank")) != bool(now["lora_rank"]):
        rank = before.get("lora_rank")
        state = f"an adapter; resume it with --lora_rank {rank}"
        if not rank:
            state = "all weights; resume it without --lora_rank"
        raise ConfigError(f"{name} trains {state}, or use another --run_name")
    changed = [
        f"{SETTINGS[flag].typed} {_shortened(before[flag])} -> {_shortened(now[flag])}"
        for section in _LEARNING_SECTIONS
        for flag in SECTIONS[section].model_fields
        if flag in before and flag not in _EXPECTED_CHANGES and before[flag] != now[flag]
    ]
    notes = list(_text_changes(config, run))
    omitted = f" and {len(changed) - _MAX_CHANGES} more" if len(changed) > _MAX_CHANGES else ""
    shown = ", ".join(changed[:_MAX_CHANGES])
    flags = [f"{name} resumes with changed flags: {shown}{omitted}"] if changed else []
    return [*flags, *notes]


def _text_changes(config: RootConfig, run: Run) -> Iterator[str]:
    """Yield a note for each text that changed in place: flags show other files, not other contents."""
    digests = text_digests(config.model) if run.text_digests else {}
    for name, digest in digests.items():
        if run.text_digests.get(name, digest) != digest:
            yield (
                f"the {name} of {config.model.model_name_or_path} is not the one that run "
                f"{run.name!r} was trained with: it may read and write other tokens"
            )


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


async def check_checkpoints(config: RootConfig, store: TrajectoryStore) -> str | None:
    """Compare a run's checkpoints with its database; return a note if the checkpoints are missing."""
    newest = max(checkpoint_paths(config.run.output_path), default=None)
    run = await store.runs.get()
    check_has_database(newest, run)
    if newest is not None or run is None or run.policy_version == 0:
        return None
    return (
        f"run {run.name!r} was at version {run.policy_version}, and {config.run.output_path} "
        "contains no checkpoint: training restarts from step 0 with the existing records"
    )
