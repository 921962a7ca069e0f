"""The inspector's HTTP interface: JSON routes about runs, and the pages that use them.

Runs come from `RunSources`, and their data from the modules of answers. Ids travel as query
parameters, because they contain slashes; every other path is a page of the front end, which reads
its place from the address.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from agentrl.datasets.task_stream import retry_dead_letters
from agentrl.errors import AgentRLError, APIError, ConfigError, StoreError, StoreUnreachable
from agentrl.inference.request_bodies import read_json_object
from agentrl.plugins.inspector.curve_answers import curves
from agentrl.plugins.inspector.example_run import ExampleTour
from agentrl.plugins.inspector.forking import (
    AskedFork,
    ForkStarter,
    fork_of,
    forks_of,
    newest_forks,
    shown,
)
from agentrl.plugins.inspector.group_tree import group_tree
from agentrl.plugins.inspector.reader_access import ReaderAccess
from agentrl.plugins.inspector.record_answers import record_answer, tokens_answer, whole_text
from agentrl.plugins.inspector.run_answers import (
    distributions,
    errors,
    other_times,
    overview,
    question_commands,
    run_row,
    run_tabs,
    step_answer,
)
from agentrl.plugins.inspector.run_sources import RunSources
from agentrl.plugins.inspector.token_texts import tokenizer_of
from agentrl.plugins.inspector.turn_tree import turn_tree_of, worst_decisions
from agentrl.runtime.http.http_guard import HttpGuard
from agentrl.runtime.processes.process_identity import this_user
from agentrl.runtime.telemetry.figure_words import TABLES
from agentrl.schema import ENDED_RUNS, DispatchedSamplingTask, Split, task_of_record
from agentrl.schema.base import Value
from agentrl.schema.image import stored_address
from agentrl.store import TrajectoryStore
from agentrl.store.views.behavior import QuestionKind
from agentrl.store.views.browsing import GroupFilter, Place

PAGES = Path(__file__).parent / "static"
GROUPS_A_PAGE = 60
PASSAGES = 60
_MAX_BODY_BYTES = 64 << 20
"""Maximum size of a change; the edited messages of a fork may be a whole conversation."""
_PLACE = "in the inspector"
"""Added to the author of a change."""
LOOK_SECONDS = 1.0
"""Polling interval of a running run, independent of the number of viewers."""
_NEVER_CHANGES = {"Cache-Control": "private, max-age=31536000, immutable"}
_IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp"})

_Handler = Callable[[TrajectoryStore, Request], Awaitable[Any]]


class AskedQuestions(Value):
    """The questions that a page shows, and their order."""

    split: Split = "train"
    kind: QuestionKind = "all"
    sort: Literal["low", "high", "lost", "gained"] = "low"


class AskedRetry(Value):
    """The repetition of failed questions that a page requests."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    split: Split | None = None
    """None for those of every split."""


class InspectorApp:
    """Answers questions about the runs of one place."""

    def __init__(
        self,
        sources: RunSources,
        writable: RunSources | None,
        *,
        version: str,
        tour: ExampleTour | None = None,
    ) -> None:
        """Wrap the sources.

        Args:
            sources: the runs to read.
            writable: the runs to change; None rejects every change.
            version: the displayed version of AgentRL.
            tour: the path through the example, if that is what is served.
        """
        self._version = version
        self._tour = tour
        self._sources = sources
        self._writable = writable
        self._forks = None if writable is None else ForkStarter(writable)
        self._rows: dict[str, dict[str, Any]] = {}
        self._reading: asyncio.Task[None] | None = None

    def asgi(self, *, token: str, host: str) -> HttpGuard:
        """Return the application wrapped in its guards."""
        read = {
            "overview": lambda store, _: overview(store),
            "curves": lambda store, request: curves(
                store,
                _integer_parameter(request, "after", 0),
                _integer_parameter(request, "until", 0) or None,
            ),
            "config": _config,
            "groups": _groups,
            "group": _group,
            "record": _record,
            "tokens": _tokens,
            "text": _text,
            "step": lambda store, request: step_answer(
                store, _integer_parameter(request, "step", 1)
            ),
            "errors": lambda store, _: errors(store),
            "distributions": lambda store, _: distributions(store),
            "failures": lambda store, _: store.behavior.failure_kinds(),
            "questions": _questions,
            "decisions": lambda store, _: worst_decisions(store),
            "diffs": lambda store, _: store.figures.diffs(),
            "live": _live,
            "tabs": lambda store, _: run_tabs(store),
            "search": _search,
            "forks": _forks,
            "shown": lambda store, request: shown(
                store, _text_parameter(request, "id"), _integer_parameter(request, "turn", 0)
            ),
        }
        change = {"control": _set_control, "retry": _retry, "fork": self._fork}
        routes = [
            Route("/api/session", self._session),
            Route("/api/runs", self._list),
            *(
                Route(f"/api/runs/{{run}}/{name}", self._read(handler))
                for name, handler in read.items()
            ),
            *(
                Route(f"/api/runs/{{run}}/{name}", self._change(handler), methods=["POST"])
                for name, handler in change.items()
            ),
            Route("/api/runs/{run}/events", self._events),
            Route("/api/runs/{run}/image", self._image),
            Route("/api/{rest:path}", _unknown_route),
            Mount("/static", StaticFiles(directory=PAGES)),
            Route("/{rest:path}", _front_end),
        ]
        app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            middleware=[
                Middleware(ReaderAccess, token=token),
                Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1),
            ],
            exception_handlers={AgentRLError: _error_response, ValidationError: _invalid_request},
        )
        app.state.config_path = self._sources.config_path
        return HttpGuard(app, host)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        open_sources = [source for source in (self._sources, self._writable) if source is not None]
        closing = [asyncio.create_task(source.close_idle()) for source in open_sources]
        try:
            yield
        finally:
            tasks = [*closing, *([self._reading] if self._reading else [])]
            for task in tasks:
                task.cancel()
            if self._forks is not None:
                await self._forks.close()
            await asyncio.gather(*tasks, return_exceptions=True)
            for source in open_sources:
                await source.close()

    async def _fork(self, store: TrajectoryStore, request: Request) -> Any:
        assert self._forks is not None, "this inspector cannot change runs: its store is read-only"
        body = await read_json_object(request, _MAX_BODY_BYTES)
        return await self._forks.start(store, AskedFork.model_validate(body))

    async def _session(self, _: Request) -> Response:
        return _json(
            {
                "version": self._version,
                "place": self._sources.place,
                "may_control": self._writable is not None,
                "words": TABLES,
                "tour": None if self._tour is None else self._tour.model_dump(),
            }
        )

    async def _list(self, _: Request) -> Response:
        """Return the known runs; runs whose data must be served first follow in later answers."""
        names = await self._sources.names()
        served = [name for name in names if self._sources.is_served(name)]
        found = await asyncio.gather(*(self._row(name) for name in served))
        rows = {**{name: self._rows[name] for name in names if name in self._rows}, **dict(found)}
        missing = [name for name in names if name not in rows]
        if missing and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read_rows(missing))
        return _json({"runs": [rows[name] for name in names if name in rows], "reading": missing})

    async def _read_rows(self, names: list[str]) -> None:
        for name in names:
            await self._row(name)

    async def _row(self, name: str) -> tuple[str, dict[str, Any]]:
        try:
            async with self._sources.opened(name) as store:
                row = await run_row(store)
        except AgentRLError as error:  # a broken folder must not hide the others
            row = {"name": name, "status": "unreadable", "error": str(error), "rewards": []}
        self._rows[name] = row
        return name, row

    def _read(self, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            async with self._sources.opened(request.path_params["run"]) as store:
                return _json(await handler(store, request))

        return endpoint

    def _change(self, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if self._writable is None:
                return _error(403, "this inspector is read-only; start it with --allow_control")
            async with self._writable.opened(request.path_params["run"]) as store:
                return _json(await handler(store, request))

        return endpoint

    async def _image(self, request: Request) -> Response:
        address = stored_address(_text_parameter(request, "key"))
        async with self._sources.opened(request.path_params["run"]) as store:
            (image,) = await store.images.get([address])
        if image.mime_type not in _IMAGE_TYPES:
            return _error(415, "images of this type are not displayed")
        return Response(image.data, media_type=image.mime_type, headers=_NEVER_CHANGES)

    async def _events(self, request: Request) -> Response:
        """Stream changes of a run and of one of its records, upon which pages repeat their requests."""
        name = request.path_params["run"]
        record_id = request.query_params.get("record")

        async def stream() -> AsyncIterator[bytes]:
            last: Any = None
            while not await request.is_disconnected():
                try:
                    async with self._sources.opened(name) as store:
                        state = await _run_state(store, record_id)
                except StoreError:
                    return  # the mongod ended with its run; the browser reconnects
                if state != last:
                    last = state
                    yield b"data: " + orjson.dumps(state, option=orjson.OPT_NON_STR_KEYS) + b"\n\n"
                if state["status"] in ENDED_RUNS:
                    yield b"event: end\ndata: {}\n\n"
                    return  # an ended run's private mongod is free to end as well
                await asyncio.sleep(LOOK_SECONDS)

        headers = {"Cache-Control": "no-store"}
        return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


async def _run_state(store: TrajectoryStore, record_id: str | None) -> dict[str, Any]:
    run = await store.runs.get()
    if run is None:
        return {"status": "failed"}
    record = None if record_id is None else await store.behavior.standing(record_id)
    return {
        "status": await store.reports.state(),
        "policy_version": run.policy_version,
        "admitted_groups": run.admitted_groups,
        "updated_at": run.updated_at,
        "record": record,
    }


# --- answers --------------------------------------------------------------------------------------


async def _config(store: TrajectoryStore, _: Request) -> Any:
    run = await store.runs.get()
    return {} if run is None else run.config


async def _groups(store: TrajectoryStore, request: Request) -> Any:
    given = {name: value for name, value in request.query_params.items() if value}
    after = None
    if "after" in given:
        order, _, task_id = given.pop("after").partition(":")
        after = Place(_parse_integer(order), task_id)
    newest = given.pop("newest", "") == "1"
    wanted = GroupFilter.model_validate(given)
    page = await store.browse.groups(wanted, limit=GROUPS_A_PAGE, newest=newest, after=after)
    # How many match is known only of all of a split.
    is_whole = wanted == GroupFilter(split=wanted.split)
    return {
        "total": await store.reports.num_groups(wanted.split) if is_whole else None,
        "groups": [group.model_dump(mode="json") for group in page.groups],
        "next": None if page.next is None else f"{page.next.order}:{page.next.task_id}",
    }


async def _group(store: TrajectoryStore, request: Request) -> Any:
    rows = await store.browse.rows([_text_parameter(request, "task")])
    if not rows:
        raise ConfigError(f"unknown task {_text_parameter(request, 'task')!r}")
    (row,) = rows
    record_ids = [one.record_id for one in row.tries]
    turns = await store.turns.of_records(record_ids)
    forks = await forks_of(store, row.task_id)
    forked = [one["record_id"] for fork in forks for one in fork["tries"]]
    turns += await store.forked.turns.of_records(forked)
    run = await store.runs.get()
    others = [] if run is None else await other_times(store, run, row.task_id)
    answer = {
        **row.model_dump(mode="json"),
        "turn_tree": await turn_tree_of(store, row.task_id, turns),
        "forks": forks,
        "others": [one.model_dump(mode="json") for one in others],
    }
    scores = {one.record_id: one.score for one in row.tries}
    scores |= {one["record_id"]: one["score"] for fork in forks for one in fork["tries"]}
    if not turns:
        why = "no rollout has a turn yet"
    elif any(turn.added_images for turn in turns):
        why = "the rollouts contain images, which have no tokens to show"
    elif not any(turn.trainable for turn in turns):
        why = "these rollouts are of another model than the policy"
    else:
        why = ""
    if why:
        return {**answer, "tree": None, "why": why}
    tokenizer = tokenizer_of(run, request.app.state.config_path(store.database_name))
    advantages = await store.lineage.advantages(record_ids)
    tree = await asyncio.to_thread(
        group_tree, turns, scores, advantages, frozenset(forked), tokenizer
    )
    return {**answer, "tree": tree}


async def _record(store: TrajectoryStore, request: Request) -> Any:
    attempt = _integer_parameter(request, "attempt", 0) or None
    record_id = _text_parameter(request, "id")
    detail = await store.holding(record_id).reports.record_detail(record_id, attempt)
    return {
        **record_answer(detail, _integer_parameter(request, "start", 0)),
        "fork": await fork_of(store, record_id),
    }


async def _forks(store: TrajectoryStore, request: Request) -> Any:
    record_id = request.query_params.get("id")
    if not record_id:
        return {"forks": await newest_forks(store)}
    fork = await store.forks.of_record(record_id)
    task_id = task_of_record(record_id) if fork is None else fork.task_id
    return {"forks": await forks_of(store, task_id, record_id)}


async def _tokens(store: TrajectoryStore, request: Request) -> Any:
    turn = await _requested_turn(store, request)
    run = await store.runs.get()
    tokenizer = tokenizer_of(run, request.app.state.config_path(store.database_name))
    training = await store.lineage.last_training(turn)
    seen = None if training is None else training.tokens
    start = _integer_parameter(request, "start", 0)
    return await asyncio.to_thread(tokens_answer, turn, seen, tokenizer, start)


async def _requested_turn(store: TrajectoryStore, request: Request) -> DispatchedSamplingTask:
    turn_id = _text_parameter(request, "turn")
    (turn,) = await store.holding(turn_id).turns.get_many([turn_id])
    return turn


async def _text(store: TrajectoryStore, request: Request) -> Any:
    turn = await _requested_turn(store, request)
    return whole_text(
        turn, _text_parameter(request, "part"), _integer_parameter(request, "start", 0)
    )


async def _questions(store: TrajectoryStore, request: Request) -> Any:
    names = AskedQuestions.model_fields
    given = {name: value for name, value in request.query_params.items() if name in names}
    asked = AskedQuestions.model_validate(given)
    found = await store.behavior.questions(asked.split, asked.kind, asked.sort)
    return {**found, "commands": question_commands(store.database_name, asked.kind)}


async def _live(store: TrajectoryStore, _: Request) -> Any:
    return {"rollouts": await store.behavior.running()}


async def _search(store: TrajectoryStore, request: Request) -> Any:
    found = await store.browse.search(_text_parameter(request, "q"), limit=PASSAGES)
    rows = await store.browse.rows(sorted({one.task_id for one in found.found}))
    scores = {one.record_id: one.score for row in rows for one in row.tries}
    answer = found.model_dump(mode="json")
    for one in answer["found"]:
        one["score"] = scores.get(one["record_id"])
    return answer


async def _set_control(store: TrajectoryStore, request: Request) -> Any:
    changes = await read_json_object(request, _MAX_BODY_BYTES)
    if not changes:
        raise ConfigError("a change must be a JSON object of controls and their values")
    run = await store.runs.update_control(f"{this_user()} {_PLACE}", **changes)
    return run.control.model_dump(mode="json")


async def _retry(store: TrajectoryStore, request: Request) -> Any:
    asked = AskedRetry.model_validate(await read_json_object(request, _MAX_BODY_BYTES))
    num_added = await retry_dead_letters(store, asked.split)
    await store.audit.add("retry", {"split": asked.split, "num_added": num_added}, place=_PLACE)
    return {"num_added": num_added}


# --- requests and responses -----------------------------------------------------------------------


def _json(value: Any, status: int = 200) -> Response:
    content = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    headers = {"Cache-Control": "no-store"}
    return Response(content, status, headers, media_type="application/json")


def _error(status: int, text: str) -> Response:
    return _json({"error": text}, status)


async def _unknown_route(_: Request) -> Response:
    return _error(404, "unknown route")


async def _front_end(_: Request) -> Response:
    return FileResponse(PAGES / "index.html", headers={"Cache-Control": "no-cache"})


async def _error_response(_: Request, error: Exception) -> Response:
    if isinstance(error, APIError):
        return _error(error.status, str(error))
    status = 400 if isinstance(error, ConfigError) else 404
    return _error(503 if isinstance(error, StoreUnreachable) else status, str(error))


async def _invalid_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, ValidationError)
    first = error.errors()[0]
    return _error(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")


def _text_parameter(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if not value:
        raise ConfigError(f"the request lacks the parameter {name!r}")
    return value


def _integer_parameter(request: Request, name: str, default: int) -> int:
    value = request.query_params.get(name)
    return default if value is None else _parse_integer(value)


def _parse_integer(value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        raise ConfigError(f"{value[:40]!r} is not an integer") from None
    if not -(2**31) <= number < 2**31:
        raise ConfigError(f"{value[:40]!r} is out of range")
    return number
