"""`agentrl inspect`: show a running or finished run.

Each command reads one view from the store and prints it as a page or as JSON.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, get_args

import click

from agentrl.cli.databases import opened_store, served_uri
from agentrl.config.command_line import Count, FlagCommand, FlagGroup
from agentrl.config.sections import PRIVATE_MONGO_ROOT, RootConfig
from agentrl.errors import ConfigError, StoreError
from agentrl.runtime.installation import typed_command
from agentrl.runtime.printable import one_line, printable, printable_json
from agentrl.schema import ENDED_RUNS, Outcome

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_SECONDS = 1.0
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("inspect", cls=FlagGroup, sections=("run", "store"))
def inspect() -> None:
    """Show a running or finished run."""


@inspect.command("runs")
@_json_option
async def runs(config: RootConfig, as_json: bool) -> int:
    """List all runs in this folder, or on the server of --db_connection_string."""
    from agentrl.plugins.inspector import tables

    found, num_unreadable = await _all_runs(config)
    if found or as_json or not num_unreadable:
        _show(tables.runs_page(found), found, as_json)
    return 1 if num_unreadable else 0


@inspect.command("progress")
@click.option("--follow", is_flag=True, help="Follow until the run ends or Ctrl-C.")
@_json_option
def progress(config: RootConfig, follow: bool, as_json: bool) -> int:
    """Show the progress of the run and the processes that work on it."""
    try:
        return asyncio.run(_follow(config, as_json) if follow else _progress(config, as_json))
    except KeyboardInterrupt:
        if follow:
            return 0  # Ctrl-C is the usual way to stop following
        raise


@inspect.command("records")
@click.option("--score", metavar="CONDITION", help="'>=0.5', '<0.2', 1, 0.2..0.8 or none.")
@click.option("--outcome", type=click.Choice(get_args(Outcome)), help="How the rollout ended.")
@click.option("--tool", metavar="NAME", help="A tool that the model called.")
@click.option("--step", type=Count(), help="Optimizer step that trained or dropped the records.")
@click.option("--column", metavar="NAME=VALUE", help="A value in a column of the question.")
@click.option("--search", metavar="TEXT", help="Text in the question, a reply or a tool result.")
@click.option("--limit", type=Count(), default=20, help="Maximum number of records to show. [20]")
@_json_option
async def records(config: RootConfig, limit: int, as_json: bool, **wanted: Any) -> int:
    """Find records by score, outcome, tool, step, column or text; best scores or latest questions first."""
    from agentrl.plugins.inspector import tables
    from agentrl.store.views.record_search import RecordFilter, ScoreFilter

    score = wanted.pop("score")
    condition = None if score is None else ScoreFilter.parse(score)
    async with opened_store(config) as store:
        found = await store.reports.find_records(
            RecordFilter(score=condition, **wanted), consumer=config.trainer.consumer, limit=limit
        )
    value = [record.model_dump(mode="json") for record in found]
    return _show(tables.records_page(found, limit), value, as_json)


@inspect.command("record")
@click.argument("record_id")
@click.option("--full", is_flag=True, help="Print full texts, tool schemas and tokens.")
@click.option("--attempt", type=Count(), help="Attempt to show; the last by default.")
@_json_option
async def record(
    config: RootConfig, record_id: str, full: bool, attempt: int | None, as_json: bool
) -> int:
    """Show one record turn by turn: texts, tool calls, reward, versions, training steps."""
    from agentrl.plugins.inspector.record_view import record_json, record_page

    async with opened_store(config) as store:
        held = store.holding(record_id)
        detail = await held.reports.record_detail(record_id, attempt)
    return _show(record_page(detail, full=full), record_json(detail, full=full), as_json)


@inspect.command("turns")
@click.option(
    "--by",
    type=click.Choice(("credit", "worth")),
    required=True,
    help="Lowest credit first, or the largest fall of worth (rollouts that branch).",
)
@click.option("--limit", type=Count(), default=20, help="Maximum number of turns to show. [20]")
@_json_option
async def turns(config: RootConfig, by: str, limit: int, as_json: bool) -> int:
    """Find the trained turns where the policy lost most."""
    from agentrl.plugins.inspector import tables
    from agentrl.plugins.inspector.turn_tree import worst_decisions

    async with opened_store(config) as store:
        if by == "worth":
            decisions = await worst_decisions(store, limit=limit)
            return _show(tables.decisions_page(decisions), decisions["rows"], as_json)
        found = await store.lineage.lowest_credits(config.trainer.consumer, limit=limit)
    value = [turn.model_dump(mode="json") for turn in found]
    return _show(tables.turns_page(found), value, as_json)


@inspect.command("step")
@click.argument("step", type=Count())
@_json_option
async def step(config: RootConfig, step: int, as_json: bool) -> int:
    """Show the figures of one optimizer step, and the records, turns and tool calls behind it."""
    from agentrl.plugins.inspector import tables

    async with opened_store(config) as store:
        lineage = await store.lineage.of_step(step, config.trainer.consumer)
        figures = await store.figures.step(config.trainer.consumer, step) or {}
    value = {**lineage.model_dump(mode="json"), "figures": figures}
    return _show(tables.step_page(lineage, figures), value, as_json)


@inspect.command("failures")
@click.option("--limit", type=Count(), default=50, help="Maximum number of failures to show. [50]")
@_json_option
async def failures(config: RootConfig, limit: int, as_json: bool) -> int:
    """Show failures, then exceptions of the agent, the latest first."""
    from agentrl.plugins.inspector import tables

    async with opened_store(config) as store:
        found = await store.reports.failures(limit)
        found += await store.reports.agent_errors(limit)
    value = [failure.model_dump(mode="json") for failure in found]
    return _show(tables.failures_page(found), value, as_json)


@inspect.command("samplers")
@_json_option
async def samplers(config: RootConfig, as_json: bool) -> int:
    """Show the sampler processes and their activity."""
    from agentrl.plugins.inspector import tables

    async with opened_store(config) as store:
        found = await store.reports.processes()
    value = [sampler.model_dump(mode="json") for sampler in found.samplers]
    return _show(tables.samplers_page(found), value, as_json)


@inspect.command("audit")
@_json_option
async def audit(config: RootConfig, as_json: bool) -> int:
    """Show who changed what in the run: controls, retries, scores, samplers, forks, imports."""
    from agentrl.plugins.inspector import tables

    async with opened_store(config) as store:
        entries = await store.audit.all()
    value = [entry.model_dump(mode="json") for entry in entries]
    return _show(tables.audit_page(entries), value, as_json)


@inspect.command("servers")
@_json_option
async def servers(config: RootConfig, as_json: bool) -> int:
    """Show the inference servers and the versions that they serve."""
    from agentrl.plugins.inspector import tables

    async with opened_store(config) as store:
        found = await store.reports.processes()
    value = [server.model_dump(mode="json") for server in found.services]
    return _show(tables.servers_page(found), value, as_json)


@click.command("ui", cls=FlagCommand, sections=("run", "store"))
@click.option("--host", default="127.0.0.1", help="Address to listen on. [127.0.0.1]")
@click.option(
    "--port", type=Count(most=65535), help="Port to listen on; a free one from 8480 by default."
)
@click.option(
    "--allow_control",
    is_flag=True,
    help="Allow visitors to pause, resume and change runs, retry failures, and fork records.",
)
@click.option(
    "--index_texts",
    is_flag=True,
    help="First create a text index of the turns, which slows down the storing of later turns.",
)
@click.option(
    "--example",
    is_flag=True,
    help="Show the finished run that ships with AgentRL, read-only, and leave nothing behind.",
)
async def ui(
    config: RootConfig,
    host: str,
    port: int | None,
    allow_control: bool,
    index_texts: bool,
    example: bool,
) -> int:
    """Show running and finished runs in a browser, until Ctrl-C.

    Without --db_connection_string, the runs of this folder are shown. Prints the address with its
    access token; set AGENTRL_UI_TOKEN to choose the token.
    """
    from agentrl.plugins.inspector.example_run import served_example
    from agentrl.plugins.inspector.inspector_server import serve_inspector
    from agentrl.runtime.installation import package_version
    from agentrl.runtime.logs import setup_logging

    setup_logging("ui")
    if example and (allow_control or index_texts):
        raise ConfigError("--example is read-only: leave out --allow_control and --index_texts")
    if index_texts:
        async with opened_store(config) as store:
            await store.ensure_schema()
            await store.browse.index_turns()

    def print_address(address: str) -> None:
        print(f"{address}\nPress Ctrl-C to stop it.", flush=True)

    async with AsyncExitStack() as stack:
        tour = None
        if example:
            config, tour = await stack.enter_async_context(served_example(config))
        await serve_inspector(
            config,
            host=host,
            port=port,
            allow_control=allow_control,
            version=package_version(),
            when_ready=print_address,
            tour=tour,
        )
    return 0


def _show(page: "RenderableType", value: Any, as_json: bool) -> int:
    from agentrl.plugins.inspector.lines import show

    if as_json:
        print(printable_json(json.dumps(value, ensure_ascii=False)))
    else:
        show(page)
    return 0


async def _progress(config: RootConfig, as_json: bool) -> int:
    from agentrl.plugins.inspector import tables

    async with opened_store(config) as store:
        view = await store.reports.overview(config.trainer.consumer)
    return _show(tables.progress_page(view), view.model_dump(mode="json"), as_json)


async def _follow(config: RootConfig, as_json: bool) -> int:
    from rich.console import Console
    from rich.live import Live

    from agentrl.launcher.console.progress_display import Rates, draws_in_place
    from agentrl.plugins.inspector import tables

    console, rates = Console(highlight=False), Rates()
    live = Live(console=console, auto_refresh=False) if draws_in_place(console) else None
    async with opened_store(config) as store:
        if live is not None and not as_json:
            live.start(refresh=False)
        try:
            while True:
                view = await store.reports.overview(config.trainer.consumer)
                rates.add(view.progress)
                if as_json:
                    print(printable_json(view.model_dump_json()), flush=True)
                elif live is not None:
                    live.update(tables.progress_page(view, rates), refresh=True)
                else:
                    print(one_line(tables.progress_line(view)), flush=True)
                if view.summary.status in {*ENDED_RUNS, "interrupted"}:
                    return 0
                await asyncio.sleep(REFRESH_SECONDS)
        finally:
            if live is not None:
                live.stop()


async def _all_runs(config: RootConfig) -> tuple[list[dict[str, Any]], int]:
    """Return all runs of the named server, or of every private mongod's data below this folder.

    `uri` is the address of a run's database, `opened_by` the command that serves it if it is not
    served. The second value is the number of unreadable folders; each is named on standard error.
    """
    from agentrl.store.mongod_folder import serving

    given = config.store.db_connection_string
    if given is not None:
        return await _runs_at(given.get_secret_value()), 0
    found: list[dict[str, Any]] = []
    num_unreadable = 0
    for data_dir in sorted(PRIVATE_MONGO_ROOT.glob("*/")):
        section = config.store.model_copy(update={"mongo_data_dir": data_dir})
        open_command = typed_command("store", "up", "--run_name", data_dir.name)
        try:
            is_served = serving(data_dir) is not None
            with served_uri(config.model_copy(update={"store": section})) as uri:
                found += await _runs_at(uri, None if is_served else open_command)
        # A broken or unreadable folder must not hide the others.
        except (StoreError, PermissionError) as error:
            reason = error.strerror if isinstance(error, PermissionError) else error
            print(printable(f"agentrl inspect: {data_dir}: {reason}"), file=sys.stderr)
            num_unreadable += 1
    return found, num_unreadable


async def _runs_at(uri: str, opened_by: str | None = None) -> list[dict[str, Any]]:
    from agentrl.store import TrajectoryStore

    found = []
    async with TrajectoryStore.connect(uri, "agentrl") as server:
        names = await server.reports.run_names()
        for name in await server.reports.names_without_run():
            drop = typed_command("store", "drop", "--run_name", name)
            note = (
                f"agentrl inspect: database {name!r} has no run: an import that was killed left it, or "
                f"its tasks wait for the first start; {drop} deletes it"
            )
            print(printable(note), file=sys.stderr)
    for name in names:
        async with TrajectoryStore.connect(uri, name) as store:
            summary = await store.reports.summary()
            places = {"uri": store.redacted_uri, "opened_by": opened_by}
            found.append({**summary.model_dump(mode="json"), **places})
    return found
