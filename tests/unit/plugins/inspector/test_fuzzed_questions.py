"""Whatever is asked of the inspector is answered, never with a 500, and its loop goes on."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack

import httpx
import pytest
from hypothesis import strategies as st
from pydantic import SecretStr
from support.described import encoded
from support.fuzzing import TryCases
from support.inspected import seed

from agentrl.config.sections import RootConfig, StoreSection
from agentrl.plugins.inspector.inspector_app import InspectorApp
from agentrl.plugins.inspector.run_sources import RunSources
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

RECORD = "train/0/q1/0"
ASKED = (
    *("overview", "curves", "config", "groups", "group", "record", "tokens", "text", "step"),
    *("errors", "search", "forks", "diffs", "shown", "image", "nothing"),
    *("distributions", "failures", "questions", "live"),
)
texts = st.text(max_size=12) | st.sampled_from(
    ["", "\x00", "a" * 3000, "$where", '"', '"a', "-", "../..", RECORD, f"{RECORD}/1/0", "é\ud800"]
)
numbers = st.integers() | st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 10**400, float("nan")])
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
PARAMETERS = st.dictionaries(
    st.sampled_from(
        [
            *("id", "task", "turn", "start", "part", "q", "key", "step", "after", "newest"),
            *("attempt", "split", "tag", "tool", "text", "outcome", "min_score", "max_score"),
            *("min_spread", "version", "min_attempts", "min_tokens", "token", "until"),
            *("kind", "sort", "record"),
        ]
    ),
    (texts | numbers.map(str)).map(lambda text: text.encode("utf-8", "replace").decode()),
    max_size=4,
)
BODIES = (
    st.binary(max_size=40)
    | anything
    | st.dictionaries(
        st.sampled_from(["sampling_paused", "max_staleness", "by", "self", "learning_rate"]),
        anything,
        max_size=3,
    )
    | st.fixed_dictionaries(
        {"record": texts, "turn": numbers},
        optional={"version": anything, "tries": numbers, "messages": anything, "x": anything},
    )
)


class Inspector:
    """An inspector of a seeded run, and a loop in which questions are put to it one by one."""

    def __init__(self, uri: str) -> None:
        self._runner = asyncio.Runner()
        self._open = AsyncExitStack()
        self._runner.run(self._start(uri))

    async def _start(self, uri: str) -> None:
        store = await self._open.enter_async_context(TrajectoryStore.connect(uri))
        await store.ensure_schema()
        self.name = store.database_name
        await seed(store, self.name)
        self._open.push_async_callback(store.drop_database)
        config = RootConfig(store=StoreSection(db_connection_string=SecretStr(uri)))
        sources, writable = RunSources(config), RunSources(config, may_write=True)
        self._open.push_async_callback(sources.close)
        self._open.push_async_callback(writable.close)
        app = InspectorApp(sources, writable, version="1").asgi(token="t", host="127.0.0.1")
        self._client = await self._open.enter_async_context(
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app),
                base_url="http://127.0.0.1:8480",
                headers={"Authorization": "Bearer t", "Content-Type": "application/json"},
            )
        )

    def get(self, name: str, parameters: dict[str, str]) -> httpx.Response:
        return self._runner.run(
            self._client.get(f"/api/runs/{self.name}/{name}", params=parameters)
        )

    def post(self, name: str, body: object) -> httpx.Response:
        return self._runner.run(
            self._client.post(f"/api/runs/{self.name}/{name}", content=encoded(body))
        )

    def close(self) -> None:
        self._runner.run(self._open.aclose())
        self._runner.close()


@pytest.fixture(scope="module")
def inspector(mongod: EmbeddedMongo) -> Iterator[Inspector]:
    opened = Inspector(mongod.uri(f"test_{uuid.uuid4().hex[:12]}"))
    yield opened
    opened.close()


@pytest.mark.fuzz(30)
def test_any_question_is_answered(inspector: Inspector, try_cases: TryCases) -> None:
    def ask(name: str, parameters: dict[str, str]) -> None:
        answer = inspector.get(name, parameters)
        try_cases.note_status(answer.status_code)
        assert answer.status_code in (200, 303, 400, 404, 415), (answer.status_code, answer.text)

    try_cases(ask, name=st.sampled_from(ASKED), parameters=PARAMETERS)


@pytest.mark.fuzz(30)
def test_any_change_is_made_or_refused(inspector: Inspector, try_cases: TryCases) -> None:
    def change(name: str, body: object) -> None:
        answer = inspector.post(name, body)
        try_cases.note_status(answer.status_code)
        assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text)

    try_cases(change, name=st.sampled_from(["control", "fork"]), body=BODIES)
