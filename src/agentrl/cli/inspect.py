"""`agentrl inspect`: look into a run that goes on, or into one that has ended."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from agentrl.cli.arguments import Action, Asked, parse_action
from agentrl.config.sections import PRIVATE_MONGO_ROOT, RootConfig
from agentrl.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from agentrl.store import TrajectoryStore

REFRESH_SECONDS = 1.0

ACTIONS = {
    "runs": Action("all runs of this machine, or of the server that is named", switches=("json",)),
    "progress": Action(
        "how far the run is and who works on it; --follow until it ends or Ctrl-C",
        switches=("follow", "json"),
    ),
    "record": Action(
        "one try, turn by turn: texts, tool calls, results, reward, versions, what steps made of it",
        operand="RECORD_ID",
        switches=("full", "json"),
        options=("attempt",),
    ),
    "step": Action(
        "the records, turns and tool calls behind the weights of one optimizer step",
        operand="STEP",
        switches=("json",),
    ),
    "failures": Action("what went wrong, the latest first", switches=("json",), options=("limit",)),
    "samplers": Action("sampler processes and what they do", switches=("json",)),
    "servers": Action("inference servers and what they serve", switches=("json",)),
}


def main(argv: Sequence[str]) -> int:
    """Show what was asked for."""
    asked = parse_action("inspect", ACTIONS, argv)
    if asked.action == "progress" and "follow" in asked.switches:
        try:
            return asyncio.run(_follow(asked))
        except KeyboardInterrupt:
            return 0  # Ctrl-C is how following ends
    return asyncio.run(_show(asked))


async def _show(asked: Asked) -> int:
    from agentrl.cli import pages

    value: Any
    page: RenderableType
    if asked.action == "runs":
        found = await _runs(asked.config)
        value, page = found, pages.runs_page(found)
    else:
        async with _store(asked.config) as store:
            value, page = await _PAGES[asked.action](store, asked)
    if "json" in asked.switches:
        print(json.dumps(value, ensure_ascii=False))
    else:
        Console(highlight=False).print(page)
    return 0


async def _progress(store: "TrajectoryStore", asked: Asked) -> tuple[Any, RenderableType]:
    from agentrl.cli.pages import progress_page

    view = await store.reports.overview(asked.config.trainer.consumer)
    return view.model_dump(mode="json"), progress_page(view)


async def _record(store: "TrajectoryStore", asked: Asked) -> tuple[Any, RenderableType]:
    from agentrl.cli.story import story_json, story_page

    attempt = asked.number("attempt", 1) if "attempt" in asked.options else None
    story = await store.reports.record_detail(asked.operand, attempt)
    return story_json(story), story_page(story, full="full" in asked.switches)


async def _step(store: "TrajectoryStore", asked: Asked) -> tuple[Any, RenderableType]:
    from agentrl.cli.pages import step_page

    if not asked.operand.isdecimal():
        raise ConfigError(f"{asked.operand!r} is no step; steps are whole numbers from 1")
    lineage = await store.lineage.of_step(int(asked.operand), asked.config.trainer.consumer)
    return lineage.model_dump(mode="json"), step_page(lineage)


async def _failures(store: "TrajectoryStore", asked: Asked) -> tuple[Any, RenderableType]:
    from agentrl.cli.pages import failures_page

    failures = await store.reports.failures(asked.number("limit", 50))
    return [failure.model_dump(mode="json") for failure in failures], failures_page(failures)


async def _samplers(store: "TrajectoryStore", asked: Asked) -> tuple[Any, RenderableType]:
    from agentrl.cli.pages import samplers_page

    found = await store.reports.processes()
    return [one.model_dump(mode="json") for one in found.samplers], samplers_page(found)


async def _servers(store: "TrajectoryStore", asked: Asked) -> tuple[Any, RenderableType]:
    from agentrl.cli.pages import servers_page

    found = await store.reports.processes()
    return [one.model_dump(mode="json") for one in found.services], servers_page(found)


_PAGES = {
    "progress": _progress,
    "record": _record,
    "step": _step,
    "failures": _failures,
    "samplers": _samplers,
    "servers": _servers,
}


async def _follow(asked: Asked) -> int:
    from rich.live import Live

    from agentrl.cli.pages import Rates, progress_line, progress_page

    console, rates = Console(highlight=False), Rates()
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    as_json = "json" in asked.switches
    async with _store(asked.config) as store:
        if live is not None and not as_json:
            live.start(refresh=False)
        try:
            while True:
                view = await store.reports.overview(asked.config.trainer.consumer)
                rates.note(view)
                if as_json:
                    print(view.model_dump_json(), flush=True)
                elif live is not None:
                    live.update(progress_page(view, rates), refresh=True)
                else:
                    print(progress_line(view), flush=True)
                if view.summary.status in ("completed", "failed"):
                    return 0
                await asyncio.sleep(REFRESH_SECONDS)
        finally:
            if live is not None:
                live.stop()


async def _runs(config: RootConfig) -> list[dict[str, Any]]:
    """Return all runs of the named server, or of every private mongod's data below this folder."""
    from agentrl.cli.uri import served_uri
    from agentrl.store.private_mongod import is_private_uri

    given = config.store.db_connection_string
    if given is not None and not is_private_uri(given.get_secret_value()):
        return await _runs_at(given.get_secret_value())
    found: list[dict[str, Any]] = []
    for data_dir in sorted(PRIVATE_MONGO_ROOT.glob("*/")):
        store = config.store.model_copy(
            update={"mongo_data_dir": data_dir, "db_connection_string": None}
        )
        try:
            with served_uri(config.model_copy(update={"store": store})) as uri:
                found += await _runs_at(uri)
        except StoreError as error:  # one broken folder must not hide the others
            print(f"agentrl inspect: {data_dir}: {error}", file=sys.stderr)
    return found


async def _runs_at(uri: str) -> list[dict[str, Any]]:
    from agentrl.store import TrajectoryStore

    found = []
    async with TrajectoryStore.connect(uri, "admin") as server:
        names = await server.reports.run_names()
    for name in names:
        async with TrajectoryStore.connect(uri, name) as store:
            summary = await store.reports.summary()
            found.append({**summary.model_dump(mode="json"), "uri": store.redacted_uri})
    return found


@asynccontextmanager
async def _store(config: RootConfig) -> "AsyncIterator[TrajectoryStore]":
    from agentrl.cli.uri import opened_store

    async with opened_store(config) as store:
        yield store
