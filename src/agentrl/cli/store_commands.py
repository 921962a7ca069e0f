"""`agentrl store`: serve, control, rescore, measure, copy, tidy up and delete a run's database."""

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentrl.cli.databases import opened_store, served_uri, trained_run
from agentrl.config.command_line import FlagGroup, Steps
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.plugin_registry import hooks, required_hook
from agentrl.runtime.printable import counted, one_line
from agentrl.runtime.processes.process_identity import this_user
from agentrl.schema import ENDED_RUNS

if TYPE_CHECKING:
    from agentrl.rewards import AgentConfig, Scorer

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_json_option: _Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON instead of text."
)
_yes_option: _Decorator = click.option(
    "--yes", "is_confirmed", is_flag=True, help="Delete without asking."
)

_POLL_SECONDS = 0.2
_NO_SNAPSHOT = (
    "no snapshot: the run was active, and this MongoDB offers no snapshot reads, so documents may "
    "be missing that others refer to"
)


@click.group("store", cls=FlagGroup, sections=("run", "store", "rollout"))
def store() -> None:
    """Manage the database of a running or finished run."""


@store.command("up")
@click.option(
    "--show_password", is_flag=True, help="Print the connection string with its password."
)
def up(config: RootConfig, show_password: bool) -> int:
    """Serve the data of a private mongod to other tools, until Ctrl-C."""
    from agentrl.config.secrets import redact
    from agentrl.runtime.processes.signals import stop_signals
    from agentrl.store.database import with_database
    from agentrl.store.mongod_folder import is_joined
    from agentrl.store.private_mongod import EmbeddedMongo, running_uri

    def connection_string(uri: str) -> str:
        uri = with_database(uri, config.run.run_name)
        hint = "(--show_password prints the password too, for Compass or mongosh)"
        return uri if show_password else f"{redact(uri)}\n{hint}"

    data_dir = config.private_mongo_dir
    if not data_dir.is_dir():
        raise ConfigError(
            f"{data_dir} does not exist; check the run's name, {config.run.run_name!r}"
        )
    running = running_uri(data_dir)
    if running is not None:
        print(f"the run is active and its mongod is up: {connection_string(running)}")
        return 0
    with EmbeddedMongo(data_dir, config.store.mongo_port or 0) as mongo:
        stop = threading.Event()
        for signum in stop_signals():
            signal.signal(signum, lambda *_: stop.set())
        print(
            f"{connection_string(mongo.uri())}\nPress Ctrl-C to stop it; the data is kept.",
            flush=True,
        )
        stop.wait()
        if is_joined(data_dir):
            print(
                "Another command works on it; it stops after that one, or at the next Ctrl-C.",
                flush=True,
            )
            stop.clear()
            while is_joined(data_dir) and not stop.wait(_POLL_SECONDS):
                pass
    return 0


@store.command("set")
@click.argument("key")
@click.argument("value")
async def set_control(config: RootConfig, key: str, value: str) -> int:
    """Change a setting of a running run; samplers and trainer follow within two seconds.

    VALUE is JSON (`true`, `4`, `0.7`) or the name of a scorer; `null` restores the value that the
    processes were started with.
    """
    setting: Any
    if key == "scorer" and value != "null":
        setting = configured_scorer(config, value)[0].name
    else:
        try:
            setting = json.loads(value)
        except ValueError:
            raise ConfigError(
                f"{value!r} is not JSON: give true, false, null or a number (for example: {key} 2)"
            ) from None
    async with opened_store(config) as opened:
        run = await opened.runs.update_control(this_user(), **{key: setting})
        change = run.control_log[-1]
        before, after = change.before.get(key), change.after[key]
        print(f"{run.name}: {key} {json.dumps(before)} -> {json.dumps(after)}")
        if run.status in ENDED_RUNS:
            print(f"note: {run.name} has ended; the change applies when it is resumed")
    return 0


@store.command("cordon")
@click.argument("sampler")
async def cordon(config: RootConfig, sampler: str) -> int:
    """Let a sampler claim nothing more; it finishes what it runs.

    SAMPLER is an id from `agentrl inspect samplers`, or a host for all samplers there. Before its
    machine goes, end it with SIGTERM: it hands back what it could not finish.
    """
    return await _cordon(config, sampler, this_user())


@store.command("uncordon")
@click.argument("sampler")
async def uncordon(config: RootConfig, sampler: str) -> int:
    """Let a cordoned sampler claim again."""
    return await _cordon(config, sampler, "")


async def _cordon(config: RootConfig, sampler: str, by: str) -> int:
    async with opened_store(config) as opened:
        named = await opened.samplers.cordon(sampler, by)
        await opened.audit.add("cordon" if by else "uncordon", {"samplers": named})
        for name in named:
            print(f"{name} {'claims nothing more' if by else 'claims again'}, within seconds")
    return 0


@store.command("rescore")
@click.option("--scorer", metavar="NAME", required=True, help="Scorer to apply.")
async def rescore(config: RootConfig, scorer: str) -> int:
    """Score every finished record that lacks a score of --scorer, without sampling again.

    Records without a score because of a defect in this scorer are repaired.

    The exit status is 1 if the scorer could not score a record.
    """
    from agentrl.rewards.rescore import rescore as add_scores

    chosen, agent_config = configured_scorer(config, scorer)
    async with opened_store(config) as opened:
        counts = await add_scores(opened, chosen, agent_config)
        scorer_id = f"{chosen.name}@{chosen.version}"
        await opened.audit.add("rescore", {"scorer": scorer_id, "num_scored": counts.num_scored})
    print(
        f"{chosen.name}@{chosen.version}: {counted(counts.num_scored, 'record')} scored, "
        f"{counts.num_known} already scored, {counts.num_repaired} repaired, {counts.num_open} in "
        f"unfinished groups, {counts.num_undecided} undecided"
    )
    for reason in counts.reasons:
        print(f"  {one_line(reason)}")
    return 1 if counts.num_undecided else 0


@store.command("stats")
@_json_option
async def stats(config: RootConfig, as_json: bool) -> int:
    """Print the number of documents and bytes of each collection, and the bytes per token."""
    from rich.console import Console
    from rich.table import Table

    async with opened_store(config) as opened:
        found = await opened.maintenance.stats()
    if as_json:
        print(found.model_dump_json())
        return 0
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("collection")
    for column in ("documents", "data bytes", "on disk", "indexes"):
        table.add_column(column, justify="right")
    for collection in found.collections:
        sizes = (
            collection.num_documents,
            collection.data_bytes,
            collection.storage_bytes,
            collection.index_bytes,
        )
        table.add_row(collection.name, *(f"{size:,}" for size in sizes))
    Console(highlight=False).print(table)
    per_token = found.bytes_per_token
    ratio_text = "-" if per_token is None else f"{per_token:.1f}"
    print(f"{found.num_tokens:,} tokens, {ratio_text} bytes per token")
    return 0


@store.command("export")
@click.argument("folder", type=Path)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["jsonl", *hooks("exports")]),
    default="jsonl",
    help="Documents (jsonl) or conversations (chat). [jsonl]",
)
@click.option(
    "--all", "everything", is_flag=True, help="Include groups that no sampler has started."
)
@_json_option
async def export_run(
    config: RootConfig,
    folder: Path,
    format_: str,
    everything: bool,
    as_json: bool,
) -> int:
    """Write the run to files in FOLDER, which must not exist.

    The format jsonl contains all documents, for `agentrl store import`; chat contains the
    conversations with their scores, in one file per split.
    """
    async with opened_store(config) as opened:
        if format_ != "jsonl":
            noun, counts = await required_hook("exports", format_, "format")(opened, folder)
            counts_text = (
                ", ".join(f"{count} of {split}" for split, count in counts.items()) or "none"
            )
            _report(
                f"{noun} in {folder}: {counts_text}",
                {"folder": str(folder), f"num_{noun}": counts},
                as_json,
            )
            return 0
        manifest = await opened.transfer.export_run(folder, everything=everything)
    total = sum(file.num_documents for file in manifest.files.values())
    left_out = manifest.num_left_out
    _report(
        f"{total} documents of run {manifest.run!r} in {folder}"
        + (
            (
                f", without {counted(left_out, 'group')} that no sampler has started (include them "
                "with --all)"
            )
            if left_out
            else ""
        )
        + ("" if manifest.is_snapshot else f"; {_NO_SNAPSHOT}"),
        {
            "folder": str(folder),
            "num_documents": total,
            "num_left_out": left_out,
            "run": manifest.run,
            "is_snapshot": manifest.is_snapshot,
        },
        as_json,
    )
    return 0


@store.command("import")
@click.argument("path", type=Path)
@_json_option
async def import_run(config: RootConfig, path: Path, as_json: bool) -> int:
    """Import an export into an empty database, named by --run_name.

    PATH is a folder written by `agentrl store export` (jsonl).
    """
    from agentrl.store import TrajectoryStore
    from agentrl.store.repositories.transfer import read_manifest

    written = read_manifest(path)  # before a database is created for it
    with served_uri(config, create=True) as uri:
        async with TrajectoryStore.connect(uri, config.run.run_name) as opened:
            manifest = await opened.transfer.import_run(path)
            total = sum(file.num_documents for file in written.files.values())
            await opened.audit.add("import", {"run": manifest.run, "num_documents": total})
            _report(
                f"{total} documents of run {manifest.run!r} are in {opened.redacted_uri}",
                {"database": opened.database_name, "num_documents": total, "run": manifest.run},
                as_json,
            )
    return 0


@store.command("bundle")
@click.argument("run_name_or_dir", metavar="RUN")
@click.option("--steps", type=Steps(), required=True, help="Step (7) or steps (3-7).")
@click.option("--out", type=Path, help="File to write, `.gz` to compress; RUN_A-B.tar by default.")
@_json_option
async def bundle(
    config: RootConfig,
    run_name_or_dir: str,
    steps: tuple[int, int],
    out: Path | None,
    as_json: bool,
) -> int:
    """Write optimizer steps of a run to one file for `agentrl replay FILE`.

    RUN is the run's name, or its output directory. The file contains questions, conversations and
    weights, but no secrets of the configuration.
    """
    run = trained_run(config, run_name_or_dir)
    from agentrl.trainer.rl.bundle import write_bundle

    first, last = steps
    target = out or Path(f"{run.run.run_name}_{first}-{last}.tar")
    async with opened_store(run) as opened:
        await write_bundle(run, opened, first, last, target)
    size = await asyncio.to_thread(os.path.getsize, target)
    summary = f"steps {first} to {last} of {run.run.run_name!r} in {target} ({size:,} bytes)"
    _report(summary, {"file": str(target), "steps": [first, last], "num_bytes": size}, as_json)
    return 0


@store.command("compact")
@_yes_option
@_json_option
async def compact(config: RootConfig, is_confirmed: bool, as_json: bool) -> int:
    """Delete unneeded data: turns replaced by later attempts, and unused shared texts.

    While processes work on the run, shared texts are removed only an hour after their last use: run
    the command twice.
    """
    async with opened_store(config) as opened:
        plan = await opened.maintenance.plan_compaction()
        text = (
            f"{plan.superseded_turns} turns that later attempts replaced, "
            f"{plan.unreferenced_turns} refused turns and {plan.unreferenced_blobs} unused shared "
            f"texts ({plan.num_bytes:,} bytes)"
        )
        if not is_confirmed:
            _confirm(f"delete {text} from {opened.redacted_uri}?")
        deleted = await opened.maintenance.compact()
        await opened.audit.add("compact", deleted.model_dump())
    _report(f"deleted {text}", deleted.model_dump(), as_json)
    return 0


@store.command("drop")
@_yes_option
@_json_option
async def drop(config: RootConfig, is_confirmed: bool, as_json: bool) -> int:
    """Delete the run's database, or what an unfinished import left; the run's files are kept."""
    async with opened_store(config, also_unfinished=True) as opened:
        await opened.maintenance.check_idle()
        name = opened.database_name
        if await opened.transfer.is_unfinished():
            content = "an unfinished import and no run"
        else:
            summary = await opened.reports.summary()
            content = (
                f"its {counted(summary.num_groups, 'group')}, trained to version "
                f"{summary.policy_version}"
            )
        if not is_confirmed:
            _confirm(f"delete the database {name!r} at {opened.redacted_uri} with {content}?")
        await opened.drop_database()
    _report(f"deleted database {name!r}; the run's files are kept", {"dropped": name}, as_json)
    return 0


def configured_scorer(config: RootConfig, name: str) -> "tuple[Scorer, AgentConfig | None]":
    """Return a scorer, built-in or the user's, and the models that it may call."""
    from agentrl.rewards import MCPScorerFactory, RegisteredScoring

    scoring = RegisteredScoring.load(config.rollout)
    scoring.check(name)
    return MCPScorerFactory.get_scorer(name), scoring.agent_config


def _confirm(question: str) -> None:
    """Ask the user to confirm."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} Standard input is not a terminal; confirm with --yes")
    print(f"{question} Type yes: ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip() != "yes":
        raise ConfigError("nothing was deleted")


def _report(text: str, value: dict[str, object], as_json: bool) -> None:
    print(json.dumps(value) if as_json else text)
