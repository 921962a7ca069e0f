"""`agentrl store`: serve, measure, copy, tidy up and delete what a run left in its database."""

import asyncio
import json
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.console import Console
from rich.table import Table

from agentrl.cli.arguments import Action, Asked, parse_action
from agentrl.cli.control import main as set_control
from agentrl.cli.rescore import main as rescore
from agentrl.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from agentrl.store import TrajectoryStore

ACTIONS = {
    "up": Action("serve a private mongod's data until Ctrl-C, for looking into them"),
    "set": Action("change a control of a running run", operand="KEY VALUE"),
    "rescore": Action("score finished records anew, without sampling", options=("scorer",)),
    "stats": Action("documents, bytes and bytes a token", switches=("json",)),
    "export": Action(
        "write the run to files; --format jsonl or parquet",
        operand="FOLDER",
        switches=("json",),
        options=("format",),
    ),
    "import": Action(
        "read an export into an empty database, as --run_name", operand="FOLDER", switches=("json",)
    ),
    "compact": Action(
        "delete what nothing needs: turns that other attempts replaced, unused shared texts",
        switches=("yes", "json"),
    ),
    "drop": Action("delete the run's database", switches=("yes", "json")),
}


def main(argv: Sequence[str]) -> int:
    """Do what was asked for."""
    if argv and argv[0] == "set":
        return set_control(argv[1:])
    if argv and argv[0] == "rescore":
        return rescore(argv[1:])
    asked = parse_action("store", ACTIONS, argv)
    if asked.action == "up":
        return _up(asked)
    if asked.action == "import":
        return asyncio.run(_import(asked))
    return asyncio.run(_with_run(asked))


def _up(asked: Asked) -> int:
    from agentrl.store.private_mongod import EmbeddedMongo, running_uri

    config = asked.config
    data_dir = config.private_mongo_dir
    if not data_dir.is_dir():
        raise StoreError(f"{data_dir} does not exist; is {config.run.run_name!r} the run's name?")
    running = running_uri(data_dir)
    if running is not None:
        print(f"the run is going on and its mongod is up: {running}")
        return 0
    with EmbeddedMongo(data_dir, config.store.mongo_port) as mongo:
        print(f"{mongo.uri(config.run.run_name)}\nCtrl-C ends it; the data stay.", flush=True)
        stop = threading.Event()
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: stop.set())
        stop.wait()
    return 0


async def _with_run(asked: Asked) -> int:
    from agentrl.cli.uri import opened_store

    async with opened_store(asked.config) as store:
        return await _OF_A_RUN[asked.action](store, asked)


async def _stats(store: "TrajectoryStore", asked: Asked) -> int:
    found = await store.maintenance.stats()
    if "json" in asked.switches:
        print(found.model_dump_json())
        return 0
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("collection")
    for column in ("documents", "data bytes", "on disk", "indexes"):
        table.add_column(column, justify="right")
    for one in found.collections:
        sizes = (one.num_documents, one.data_bytes, one.storage_bytes, one.index_bytes)
        table.add_row(one.name, *(f"{size:,}" for size in sizes))
    Console(highlight=False).print(table)
    per_token = found.bytes_per_token
    shown = "-" if per_token is None else f"{per_token:.1f}"
    print(f"{found.num_tokens:,} tokens, {shown} bytes a token")
    return 0


async def _export(store: "TrajectoryStore", asked: Asked) -> int:
    from agentrl.store.repositories.transfer import Format

    format_ = asked.options.get("format", "jsonl")
    if format_ not in get_args(Format):
        raise ConfigError(f"--format {format_}: one of {', '.join(get_args(Format))}")
    manifest = await store.transfer.export_run(
        Path(asked.operand), "parquet" if format_ == "parquet" else "jsonl"
    )
    total = sum(file.num_documents for file in manifest.files.values())
    _say(
        asked,
        f"{total} documents of run {manifest.run!r} in {asked.operand}",
        {"folder": asked.operand, "num_documents": total, "run": manifest.run},
    )
    return 0


async def _compact(store: "TrajectoryStore", asked: Asked) -> int:
    await store.maintenance.check_idle()
    plan = await store.maintenance.plan_compaction()
    text = (
        f"{plan.superseded_turns} turns that later attempts replaced, "
        f"{plan.unreferenced_turns} refused turns and {plan.unreferenced_blobs} unused shared "
        f"texts ({plan.num_bytes:,} bytes)"
    )
    _ask(asked, f"delete {text} from {store.redacted_uri}?")
    done = await store.maintenance.compact()
    _say(asked, f"deleted {text}", done.model_dump())
    return 0


async def _drop(store: "TrajectoryStore", asked: Asked) -> int:
    await store.maintenance.check_idle()
    summary = await store.reports.summary()
    name = store.database_name
    _ask(
        asked,
        f"delete the database {name!r} at {store.redacted_uri} with its "
        f"{summary.num_groups} groups, trained to version {summary.policy_version}?",
    )
    await store.drop_database()
    _say(asked, f"database {name!r} is deleted; files of the run stay", {"dropped": name})
    return 0


_OF_A_RUN = {"stats": _stats, "export": _export, "compact": _compact, "drop": _drop}


async def _import(asked: Asked) -> int:
    from agentrl.cli.uri import served_uri
    from agentrl.store import TrajectoryStore
    from agentrl.store.repositories.transfer import read_manifest

    config, folder = asked.config, Path(asked.operand)
    read_manifest(folder)  # before a database is begun for it
    with served_uri(config, create=True) as uri:
        async with TrajectoryStore.connect(uri, config.run.run_name) as store:
            manifest = await store.transfer.import_run(folder)
            await store.ensure_schema()
            total = sum(file.num_documents for file in manifest.files.values())
            _say(
                asked,
                f"{total} documents of run {manifest.run!r} are in {store.redacted_uri}",
                {"database": store.database_name, "num_documents": total, "run": manifest.run},
            )
    return 0


def _ask(asked: Asked, question: str) -> None:
    """Have the user agree; `--yes` does so for scripts.

    Raises:
        ConfigError: the user does not, or nobody is there to be asked.
    """
    if "yes" in asked.switches:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} Nobody is there to be asked; say --yes")
    print(f"{question} Type yes: ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip() != "yes":
        raise ConfigError("nothing was deleted")


def _say(asked: Asked, text: str, value: dict[str, object]) -> None:
    print(json.dumps(value) if "json" in asked.switches else text)
