"""The database that a command works on: given, of a running run, or served while it is read."""

import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from agentrl.config.loading import load_config
from agentrl.config.sections import PRIVATE_MONGO_ROOT, RootConfig
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.store import TrajectoryStore

_MAX_NAMES = 5


def joined(config: RootConfig) -> RootConfig:
    """Return the configuration with the URI that `store_uri` gives."""
    section = config.store.model_copy(update={"db_connection_string": SecretStr(store_uri(config))})
    return config.model_copy(update={"store": section})


def store_uri(config: RootConfig) -> str:
    """Return the MongoDB URI of the configuration, or that of the running run's private mongod."""
    from agentrl.store.private_mongod import running_uri

    given = config.store.db_connection_string
    uri = running_uri(config.private_mongo_dir) if given is None else given.get_secret_value()
    if uri is None:
        raise ConfigError(
            "no database: give --config output/RUN_NAME/config.yaml of a running run, "
            "--db_connection_string, or MONGODB_URI"
        )
    return uri


def names_here() -> str:
    """Return the names of the latest runs of this folder, in brackets; empty if there are none."""
    folders = [path for path in PRIVATE_MONGO_ROOT.glob("*/") if path.is_dir()]
    latest = sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[:_MAX_NAMES]
    return f" ({', '.join(path.name for path in latest)})" if latest else ""


@contextmanager
def served_uri(config: RootConfig, *, create: bool = False) -> Iterator[str]:
    """Yield a URI of the run's database, whether or not the run is active.

    A database of the user is used as it is. The private mongod of a live run is used; for an ended
    run, one is started on its data for the duration of the block; with `create`, also on no data, which
    is deleted if the block fails. Enter this in the main thread.
    """
    from agentrl.store.mongod_folder import joined_data
    from agentrl.store.private_mongod import EmbeddedMongo, running_uri

    given = config.store.db_connection_string
    if given is not None:
        yield given.get_secret_value()
        return
    data_dir = config.private_mongo_dir
    if not data_dir.is_dir() and not create:
        raise ConfigError(
            f"no run {config.run.run_name!r} here: {data_dir} does not exist; give --run_name"
            f"{names_here()}, --config output/RUN_NAME/config.yaml, or --db_connection_string"
        )
    running = running_uri(data_dir)
    if running is not None:
        with joined_data(data_dir):
            yield running
        return
    is_new, is_ours = not data_dir.exists(), False
    try:
        with EmbeddedMongo(data_dir) as mongo:
            is_ours = True
            yield mongo.uri()
    except BaseException:
        if is_new and is_ours:
            shutil.rmtree(data_dir, ignore_errors=True)
        raise


def trained_run(
    config: RootConfig, name_or_dir: str, typed: Mapping[str, str] | None = None
) -> RootConfig:
    """Return the configuration that a run was trained with, under the typed flags."""
    output = Path(name_or_dir)
    if not (output / "config.yaml").is_file():
        output = config.run.output_dir or Path("output") / name_or_dir
    config_path = output / "config.yaml"
    if not config_path.is_file():
        raise ConfigError(
            f"no run {name_or_dir!r} here: {config_path} does not exist; give a run's "
            f"name{names_here()} or its output directory"
        )
    given = {
        **(typed or {}),
        "config": str(config_path),
        "output_dir": str(output.absolute()),
    }
    if config.store.db_connection_string is not None:
        given["db_connection_string"] = config.store.db_connection_string.get_secret_value()
    return load_config(given)


@asynccontextmanager
async def opened_store(
    config: RootConfig, *, also_unfinished: bool = False, also_unstarted: bool = False
) -> "AsyncIterator[TrajectoryStore]":
    """Yield the store of the run that the configuration names.

    An unfinished import holds no run, and one that another process serves may not have begun.
    """
    from agentrl.store import TrajectoryStore
    from agentrl.store.private_mongod import running_uri

    is_awaited = also_unstarted and (
        config.store.db_connection_string is not None
        or running_uri(config.private_mongo_dir) is not None
    )
    with served_uri(config) as uri:
        async with TrajectoryStore.connect(uri, config.run.run_name) as store:
            is_unfinished = also_unfinished and await store.transfer.is_unfinished()
            if not (is_awaited or is_unfinished) and await store.runs.get() is None:
                known = await store.reports.run_names()
                hint = f"; existing: {', '.join(known)}" if known else ""
                raise ConfigError(f"{store.redacted_uri} contains no run{hint}")
            yield store
