"""The inspector's HTTP: who is let in, what is refused, and what is never written."""

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from support.inspected import FORKED_RECORD, HOSTILE_RECORD, HUGE, PIXEL, seed, step_figures
from support.stored import claim, make_task, make_turn, play

from agentrl.config.named_files import shipped_file
from agentrl.config.sections import PRIVATE_MONGO_ROOT, RootConfig, RunSection, StoreSection
from agentrl.errors import StoreError
from agentrl.plugins.inspector.inspector_app import PAGES, InspectorApp
from agentrl.plugins.inspector.run_sources import RunSources
from agentrl.plugins.inspector.token_texts import tokenizer_of
from agentrl.runtime.ports import free_port
from agentrl.schema import BranchPoint, Run, ToolResult, TurnWorth
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

TOKEN = "the-token"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def config_for(uri: str) -> RootConfig:
    return RootConfig(store=StoreSection(db_connection_string=SecretStr(uri)))


@asynccontextmanager
async def client_of(
    config: RootConfig, *, may_write: bool = False, headers: dict[str, str] | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of an inspector that runs in this process."""
    sources = RunSources(config)
    writable = RunSources(config, may_write=True) if may_write else None
    app = InspectorApp(sources, writable, version="1").asgi(token=TOKEN, host="127.0.0.1")
    transport = httpx.ASGITransport(app=app)
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8480", headers=headers
        ) as client:
            yield client
    finally:
        for one in (sources, writable):
            if one is not None:
                await one.close()


@pytest.fixture
async def client(store: TrajectoryStore, mongo_uri: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client with the token, of an inspector that may control a seeded run."""
    await seed(store, store.database_name)
    async with client_of(config_for(mongo_uri), may_write=True, headers=HEADERS) as made:
        made.params = made.params.set("_", store.database_name)
        yield made


def path_of(client: httpx.AsyncClient, name: str) -> str:
    return f"/api/runs/{client.params['_']}/{name}"


async def answer(client: httpx.AsyncClient, name: str, **parameters: Any) -> Any:
    response = await client.get(path_of(client, name), params=parameters)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_pages_are_built_from_their_sources() -> None:
    """After a change of the sources: scripts/build_inspector."""
    folder = PAGES.parent / "web"
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {f"./{path.relative_to(folder).as_posix()}": path for path in files}
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n"
        for name, path in sorted(names.items())
        if not name.startswith("./node_modules/")
    ]
    built = (PAGES / "sources.sha256").read_text().strip()
    assert built == hashlib.sha256("".join(lines).encode()).hexdigest()


async def test_requests_without_the_token_or_from_elsewhere_are_refused(tmp_path: Path) -> None:
    config = RootConfig(store=StoreSection(mongo_data_dir=tmp_path))
    strangers: list[tuple[dict[str, str], int]] = [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({**HEADERS, "Host": "evil.example:8480"}, 421),
        ({**HEADERS, "Origin": "http://evil.example"}, 403),
        ({**HEADERS, "Sec-Fetch-Site": "cross-site"}, 403),
    ]
    async with client_of(config) as client:
        for headers, status in strangers:
            for path in ("/api/runs", "/api/runs?access=wrong", f"/api/session?token={TOKEN}"):
                response = await client.get(path, headers=headers)
                assert response.status_code == status, (headers, path)
                changed = await client.post("/api/runs/r/control", json={}, headers=headers)
                assert changed.status_code == status
        for page in ("/?token=wrong", "/runs/a?token=", "/%61pi/runs"):
            assert (await client.get(page)).status_code == 401
        # The code of the pages holds nothing of a run.
        assert (await client.get("/runs/a")).text == (await client.get("/nothing")).text


def place_of(redirect: httpx.Response) -> str:
    return redirect.headers["location"].partition("#key=")[0]


async def test_the_token_in_the_address_leads_to_the_page_with_a_key(
    tmp_path: Path,
) -> None:
    config = RootConfig(store=StoreSection(mongo_data_dir=tmp_path))
    async with client_of(config) as client:
        away = await client.get(httpx.URL(f"http://127.0.0.1:8480//evil.example/?token={TOKEN}"))
        assert (away.status_code, place_of(away)) == (303, "/evil.example/")
        asked = await client.get(f"/runs/a/record?id=train%2F0%2Fq1%2F0&token={TOKEN}&turn=1")
        assert place_of(asked) == "/runs/a/record?id=train%2F0%2Fq1%2F0&turn=1"
        response = await client.get(f"/runs/a?token={TOKEN}")
        assert (response.status_code, place_of(response)) == (303, "/runs/a")
        assert "set-cookie" not in response.headers
        page = await client.get("/runs/a")
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"


async def test_the_key_of_a_page_is_worth_nothing_after_a_restart(tmp_path: Path) -> None:
    """It is no token, and no cookie, which a browser would send to every port of the host."""
    config = RootConfig(store=StoreSection(mongo_data_dir=tmp_path))

    async def statuses(client: httpx.AsyncClient, key: str) -> list[int]:
        bearer = {"Authorization": f"Bearer {key}"}
        return [
            (await client.get("/api/session", headers=bearer)).status_code,
            (await client.get("/api/session", params={"access": key})).status_code,
            (await client.get("/api/session", headers={"Cookie": f"key={key}"})).status_code,
            (await client.get("/", params={"token": key})).status_code,
        ]

    async with client_of(config) as client:
        page = await client.get(f"/?token={TOKEN}")
        key = page.headers["location"].partition("#key=")[2]
        assert key != TOKEN
        assert len(key) >= 40
        assert await statuses(client, key) == [200, 200, 401, 401]
        assert (await client.get("/api/session", params={"access": TOKEN})).status_code == 401
    async with client_of(config) as restarted:
        assert await statuses(restarted, key) == [401, 401, 401, 401]


async def test_no_path_leads_out_of_the_pages(tmp_path: Path) -> None:
    config = RootConfig(store=StoreSection(mongo_data_dir=tmp_path))
    outside = (
        "../inspector_app.py",
        "..%2finspector_app.py",
        "%2e%2e/inspector_app.py",
        "/etc/passwd",
    )
    async with client_of(config, headers=HEADERS) as client:
        for path in outside:
            response = await client.get(httpx.URL(f"http://127.0.0.1:8480/static/{path}"))
            assert "RunSources" not in response.text
            assert "root:" not in response.text
        assert (await client.get("/api/nothing")).status_code == 404


async def test_every_mistake_in_a_question_is_one_line(client: httpx.AsyncClient) -> None:
    for name, parameters, status in (
        ("record", {}, 400),
        ("record", {"id": "no/such/1"}, 404),
        ("record", {"id": HOSTILE_RECORD, "attempt": "7"}, 404),
        ("record", {"id": HOSTILE_RECORD, "start": "x"}, 400),
        ("tokens", {"turn": "no"}, 404),
        ("text", {"turn": f"{HOSTILE_RECORD}/1/0", "part": "result.9"}, 404),
        ("group", {"task": "none"}, 400),
        ("groups", {"outcom": "answered"}, 400),
        ("groups", {"min_score": "much"}, 400),
        ("groups", {"after": "x"}, 400),
        ("groups", {"min_score": "nan"}, 400),
        ("groups", {"version": "9" * 30}, 400),
        ("step", {"step": "99"}, 404),
        ("image", {"key": "none"}, 404),
    ):
        response = await client.get(path_of(client, name), params=parameters)
        assert response.status_code == status, (name, parameters, response.text)
        assert response.json()["error"].count("\n") == 0
    response = await client.get("/api/runs/nowhere/overview")
    assert response.status_code == 404


HOSTILE_VALUES = (
    "\0",
    "$where",
    '"',
    "-",
    "." * 9000,
    "fork:",
    "fork:a@",
    "/",
    "9" * 400,
    "\ud7ff",
    "result.²",
)


async def test_no_question_whatever_it_holds_fails_within_the_server(
    client: httpx.AsyncClient,
) -> None:
    questions = {
        **dict.fromkeys(("record", "forks"), ("id", "attempt", "start")),
        "shown": ("id", "turn"),
        "groups": ("text", "tool", "tag", "after", "outcome", "split", "min_spread", "version"),
        "group": ("task",),
        "tokens": ("turn", "start"),
        "text": ("turn", "part"),
        "image": ("key",),
        "search": ("q",),
        "step": ("step",),
    }
    known = {"id": HOSTILE_RECORD, "turn": f"{HOSTILE_RECORD}/1/0"}
    for name, parameters in questions.items():
        for one in parameters:
            for value in HOSTILE_VALUES:
                given = {**{key: known[key] for key in parameters if key in known}, one: value}
                response = await client.get(path_of(client, name), params=given)
                assert response.status_code < 500, (name, one, value[:40], response.text)
    for run in ("%00", "..", "%2e%2e%2f", "a" * 5000):
        response = await client.get(httpx.URL(f"http://127.0.0.1:8480/api/runs/{run}/overview"))
        assert response.status_code < 500, run


async def test_long_texts_are_cut_and_the_rest_can_be_asked_for(client: httpx.AsyncClient) -> None:
    record = await answer(client, "record", id=HOSTILE_RECORD)
    content = record["turns"][0]["results"][0]["content"]
    assert content["length"] > len(HUGE)
    assert len(content["text"]) == 20_000
    rest = await answer(
        client, "text", turn=record["turns"][0]["id"], part=content["part"], start=20_000
    )
    assert len(rest["text"]) == 200_000
    assert rest["text"][:10] in HUGE
    assert rest["text"][0] == HUGE[HUGE.index(content["text"][-9:]) + 9]


async def test_a_page_has_what_the_store_holds(client: httpx.AsyncClient) -> None:
    view = await answer(client, "overview")
    assert view["progress"]["num_groups_completed"] == 3
    assert {alarm["kind"] for alarm in view["alarms"]} >= {"interrupted"}
    assert view["reward_by_tag"] == {"counting": {"mean": 0.5, "num": 2}}
    curves = await answer(client, "curves")
    assert curves["step"] == [1, 2, 3]
    assert curves["curves"]["loss"] == [0.5, 0.5, 0.5]
    assert curves["spreads"]["masked_tokens"][0] == {"stale": 2}
    step = await answer(client, "step", step=1)
    assert [one["status"] for one in step["records"]].count("trained") == 3
    assert step["records"][0]["advantage"] == pytest.approx(0.7)
    errors = await answer(client, "errors")
    assert errors["errors"][0]["text"] == "server #.#.#.#:# is gone"
    tokens = await answer(client, "tokens", turn=f"{HOSTILE_RECORD}/1/0")
    assert len(tokens["texts"]) == len(tokens["logprobs"]) == len(tokens["versions"]) == 40
    trained = (await answer(client, "tokens", turn="train/0/q0/0/1/0"))["trained"]
    assert trained["ratios"][0] == pytest.approx(0.5, abs=1e-3)
    assert trained["entropies"][-1] == 2.0
    assert trained["uses"][:4] == ["ratio_out_of_range"] * 2 + ["clipped", "trained"]
    record = await answer(client, "record", id=HOSTILE_RECORD)
    assert record["record"]["metrics"] == {"moves": 2.0, "<b>\x1bbold</b>": 0.5}
    assert (record["record"]["reward"], record["turns"][1]["reward"]) == (0.5, 0.25)
    address = record["turns"][0]["messages"][1]["images"][0]
    image = await client.get(path_of(client, "image"), params={"key": address.partition(":")[2]})
    assert (image.headers["content-type"], image.content) == ("image/png", PIXEL)


async def test_a_long_run_loses_neither_totals_nor_spikes(
    client: httpx.AsyncClient, store: TrajectoryStore
) -> None:
    steps = [step_figures(step) for step in range(4, 2501)]
    steps[1000] |= {"grad_norm": 500.0, "skipped": "the gradient is not finite"}
    await store.figures.rewind("trainer", 3, steps, [])
    curves = await answer(client, "curves")
    assert (curves["num_steps"], curves["steps_a_point"]) == (2500, 3)
    assert len(curves["step"]) == 834
    assert curves["step"][-1] == 2500
    assert curves["totals"]["staleness"] == {"0": 7500, "1": 2500}
    assert curves["totals"]["dropped"] == {"zero_variance": 2500}
    assert max(curves["highs"]["grad_norm"]) == 500
    assert max(curves["curves"]["grad_norm"]) < 500
    assert curves["lows"]["loss"][0] == curves["curves"]["loss"][0] == 0.5
    assert curves["recent"]["step"] == [*range(2381, 2501)]
    assert [(one["step"], one["kind"]) for one in curves["alarms"]] == [(1004, "skipped steps")]
    near = await answer(client, "curves", after=999, until=1010)
    assert near["step"] == [*range(1000, 1011)]
    assert near["curves"]["grad_norm"][4] == 500
    assert "highs" not in near


async def test_rollouts_are_told_by_step_question_and_kind_of_failure(
    client: httpx.AsyncClient, store: TrajectoryStore
) -> None:
    columns = (await answer(client, "distributions"))["columns"]
    assert columns["step"] == [1] * 4
    assert columns["num_turns"] == [2] * 4
    assert columns["num_tool_errors"] == [0] * 4
    assert columns["num_output_tokens"] == [46, 47, 48, 49]
    found = await answer(client, "questions")
    assert found["counts"] == {"nobody": 1, "everybody": 0, "some": 2}
    assert [row["times"]["0"]["mean"] for row in found["rows"]] == [0, 0.5, 0.5]
    nobody = await answer(client, "questions", kind="nobody")
    assert nobody["ids"] == ["q2"]
    assert any(" tasks add " in command for _, command in nobody["commands"])
    later = make_task(0, num_generations=1).model_copy(update={"id": "train/1/q0", "order": 50})
    await store.tasks.add([later, make_task(51)])
    assert (await answer(client, "live"))["rollouts"] == []
    await play(store, await claim(store), score=1.0)
    running = await claim(store)
    first = make_turn(running, 0, num_output=4, text="Let me think.")
    await store.turns.append(first, running.fence)
    (row,) = (await answer(client, "live"))["rollouts"]
    assert (row["record_id"], row["num_turns"], row["said"]) == (running.id, 1, "Let me think.")
    gained = (await answer(client, "questions", sort="gained"))["rows"][0]
    assert (gained["question"], gained["change"]) == ("q0", 0.5)
    failures = await answer(client, "failures")
    kinds = {one["kind"]: one for one in failures["kinds"]}
    assert kinds["wrong answer"]["num"] == 3
    assert kinds["wrong answer"]["reply"].startswith("<answer>")
    assert kinds["failed"]["record_id"] == "train/0/q2/1"
    assert failures["tools"] == []


async def test_tool_errors_are_grouped_with_an_example(
    client: httpx.AsyncClient, store: TrajectoryStore
) -> None:
    await store.tasks.add([make_task(50, num_generations=2)])
    for _ in range(2):
        record = await claim(store)
        turn = make_turn(record, 0, num_output=4, text="I look.")
        await store.turns.append(turn, record.fence)
        wrong = ToolResult(call_id="c1", name="lookup", content="no item 4711", is_error=True)
        await store.turns.set_tool_results(turn.id, record.id, record.fence, [wrong])
        await play(store, record, score=0.0, num_turns=0)
    (tool,) = (await answer(client, "failures"))["tools"]
    assert (tool["num"], tool["tool"], tool["text"]) == (2, "lookup", "no item 4711")
    assert tool["turn"] == 0


async def test_calls_are_timed_by_tool_without_the_copies_in_branches(
    client: httpx.AsyncClient, store: TrajectoryStore
) -> None:
    await store.tasks.add([make_task(50, num_generations=20)])
    claimed = []
    for number in range(1, 21):
        record = await claim(store)
        claimed.append(record.id)
        turn = make_turn(record, 0, num_output=4, text="I look.")
        await store.turns.append(turn, record.fence)
        result = ToolResult(
            call_id="c1", name="search", content="", seconds=number, is_error=number % 10 == 0
        )
        await store.turns.set_tool_results(turn.id, record.id, record.fence, [result])
        await play(store, record, score=0.0, num_turns=0)
    copied = BranchPoint(record_id="train/0/q50/0", attempt=1, turn=1, rule="random")
    await store.database.record_data.update_one(
        {"_id": claimed[-1]}, {"$set": {"branch": copied.model_dump()}}
    )
    found = await answer(client, "failures")
    search, lookup = found["times"]
    assert sum(tool["num"] for tool in found["tools"]) == 1
    assert (search["tool"], search["num"], search["num_errors"]) == ("search", 19, 1)
    assert (search["median"], search["p95"], search["total"]) == (10, 19, 190)
    assert search["slowest"]["seconds"] == 19
    assert lookup["median"] == 0.25


async def test_a_group_names_those_of_the_same_question_in_other_epochs(
    client: httpx.AsyncClient, store: TrajectoryStore
) -> None:
    later = make_task(0, num_generations=1).model_copy(update={"id": "train/1/q0", "order": 50})
    await store.tasks.add([later])
    assert (await answer(client, "group", task="train/0/q0"))["others"] == []
    await play(store, await claim(store), score=0.5)
    (other,) = (await answer(client, "group", task="train/0/q0"))["others"]
    assert (other["task_id"], other["tries"][0]["score"]) == ("train/1/q0", 0.5)
    assert [
        one["task_id"] for one in (await answer(client, "group", task="train/1/q0"))["others"]
    ] == ["train/0/q0"]


async def test_branches_have_the_trainers_advantages_or_what_a_score_is_above_the_mean(
    client: httpx.AsyncClient,
) -> None:
    (trained, untrained) = [
        (await answer(client, "group", task=f"train/0/q{number}"))["tree"]["nodes"]
        for number in (0, 1)
    ]
    assert [node["advantage"] for node in trained] == pytest.approx([0.7] * len(trained))
    found = {tuple(node["records"]): node for node in untrained}
    first, second = (f"train/0/q1/{number}" for number in (0, 1))
    assert found[first,]["advantage"] == pytest.approx(0.7)
    assert found[second,]["advantage"] == 0.5
    assert [node["records"] for node in untrained if node["diverges"]] == [[first, second]]


async def test_the_worst_decisions_are_those_after_which_the_worth_fell_most(
    client: httpx.AsyncClient, store: TrajectoryStore
) -> None:
    assert await answer(client, "decisions") == {"has_branches": False, "rows": []}
    (first, last) = (await store.lineage.of_record(FORKED_RECORD)).turns
    (training,) = first.trainings
    found = [
        training.model_copy(
            update={
                "id": f"trainer/{step}/{turn.id}",
                "step": step,
                "turn_id": turn.id,
                "advantage": change,
                "worth": TurnWorth(
                    after=0.25, change=change, num_leaves=2, is_decision=is_decision
                ),
            }
        )
        for step, turn, change, is_decision in (
            (2, first, -0.25, True),
            (3, last, -0.5, True),
            (4, first, -0.25, True),
            (5, last, -0.75, False),
            (6, first, 0.5, True),
        )
    ]
    await store.ledger.put_turn_trainings(found)
    rows = (await answer(client, "decisions"))["rows"]
    assert [(row["step"], row["index"], row["worth"]["change"]) for row in rows] == [
        (3, 1, -0.5),
        (4, 0, -0.25),
        (2, 0, -0.25),
    ]
    assert rows[0]["text"] == "<answer>0</answer>"
    assert rows[1]["text"].startswith("lookup(figs")
    assert rows[0]["task_id"] == "train/0/q0"
    assert rows[0]["question"]


async def test_a_reader_changes_nothing(store: TrajectoryStore, mongo_uri: str) -> None:
    await seed(store, store.database_name)
    path = f"/api/runs/{store.database_name}"
    async with client_of(config_for(mongo_uri), headers=HEADERS) as client:
        for name in ("control", "retry", "fork"):
            response = await client.post(f"{path}/{name}", json={"sampling_paused": True})
            assert response.status_code == 403
            assert "--allow_control" in response.json()["error"]
    run = await store.runs.get()
    assert run is not None
    assert not run.control.sampling_paused


async def test_controls_are_checked_and_logged(
    client: httpx.AsyncClient, store: TrajectoryStore
) -> None:
    path = path_of(client, "control")
    for wrong in ({"no_such": 1}, {"by": "me"}, {"max_staleness": "much"}, {}, [1]):
        response = await client.post(path, json=wrong)
        assert response.status_code == 400, wrong
    form = {**HEADERS, "Content-Type": "text/plain"}
    assert (
        await client.post(path, content='{"max_staleness": 3}', headers=form)
    ).status_code == 415
    response = await client.post(path, json={"max_staleness": 3})
    assert response.json()["max_staleness"] == 3
    run = await store.runs.get()
    assert run is not None
    assert "inspector" in run.control_log[-1].by
    retry = path_of(client, "retry")
    no_retries: list[Any] = [{"splits": "train"}, {"split": "tarin"}, {"split": ["train"]}, [1]]
    for no_retry in no_retries:
        response = await client.post(retry, json=no_retry)
        assert response.status_code == 400, no_retry
    assert (await client.post(retry, content="{}", headers=form)).status_code == 415
    others = await client.post(retry, json={"split": "eval"})
    assert others.json() == {"num_added": 0}
    retried = await client.post(retry, json={"split": "train"})
    assert retried.json() == {"num_added": 1}


async def test_bodies_that_are_no_change_are_refused_in_one_line(
    client: httpx.AsyncClient,
) -> None:
    json_type = {"Content-Type": "application/json"}
    bodies = (b"", b"{", b"\xff", b"nul", b"[1]", b'{"turn": NaN}', b'{"a": "\\ud800"}')
    for name in ("control", "fork", "retry"):
        for body in (*bodies, b'{"a": ' * 101 + b"1" + b"}" * 101):
            response = await client.post(path_of(client, name), content=body, headers=json_type)
            assert response.status_code == 400, (name, body, response.text)
            assert response.json()["error"].count("\n") == 0


@pytest.mark.parametrize("is_imported", [False, True])
async def test_a_fork_reads_no_configuration_that_a_document_names(
    client: httpx.AsyncClient,
    store: TrajectoryStore,
    folder: Path,
    is_imported: bool,
) -> None:
    sent = folder / "sent"
    sent.mkdir()
    (sent / "config.yaml").write_text("run_name: theirs\nscorer_module: theirs.py\n")
    changes: dict[str, Any] = {"config.output_dir": str(sent)}
    if is_imported:
        changes["imported_policies"] = []
    await store.database.runs.update_one({}, {"$set": changes})
    body = {"record": HOSTILE_RECORD, "turn": 0}
    response = await client.post(path_of(client, "fork"), json=body)
    assert response.status_code == 400
    told = response.json()["error"]
    name = store.database_name
    reason = "was imported" if is_imported else f"is not in output/{name}/config.yaml"
    assert reason in told
    typed = f"fork {HOSTILE_RECORD} --turn 0 --run_name {name} --config CONFIG.yaml"
    assert told.endswith(typed)
    assert str(sent) not in told


async def test_private_data_are_read_through_a_login_that_cannot_write(
    mongod: EmbeddedMongo, store: TrajectoryStore
) -> None:
    await seed(store, store.database_name)
    config = RootConfig(
        run=RunSection(run_name=store.database_name),
        store=StoreSection(mongo_data_dir=mongod.data_dir),
    )
    sources = RunSources(config)
    try:
        async with sources.opened(store.database_name) as opened:
            assert (await opened.reports.summary()).num_groups == 3
            with pytest.raises(StoreError, match="does not authorize"):
                await opened.runs.update_control(max_staleness=9)
    finally:
        await sources.close()


async def test_runs_that_had_the_same_port_are_opened_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["first", "second", "third"]
    port = free_port()
    for name in names:
        with EmbeddedMongo(PRIVATE_MONGO_ROOT / name, port) as mongo:
            async with TrajectoryStore.connect(mongo.uri(name), name) as store:
                await store.ensure_schema()
                await store.runs.create(Run(name=name, config={}, status="completed"))
        assert mongo.port == port

    async with client_of(RootConfig(), headers=HEADERS) as client:
        answers = await asyncio.gather(
            *(client.get(f"/api/runs/{name}/overview") for name in names)
        )
    assert [found.status_code for found in answers] == [200] * len(names), answers[0].text


async def test_a_run_without_processes_is_interrupted_on_every_page(
    client: httpx.AsyncClient, store: TrajectoryStore
) -> None:
    await store.runs.set_status("training")
    await store.runs.set_phase("sampling")
    await store.database["samplers"].delete_many({})
    await store.database["runs"].update_one({}, {"$set": {"trainer_leases": {}}})
    found = await answer(client, "overview")
    assert (found["status"], found["is_live"]) == ("interrupted", False)
    listed = (await client.get("/api/runs")).json()["runs"]
    (row,) = [one for one in listed if one["name"] == store.database_name]
    assert (row["status"], row["is_live"]) == ("interrupted", False)


def test_a_database_names_no_other_folder_than_the_run_s_own_configuration(tmp_path: Path) -> None:
    model = shutil.copytree(shipped_file("assets/demo/model"), tmp_path / "model")
    run = Run(name="run", config={"model_name_or_path": str(model)})
    config = tmp_path / "config.yaml"
    assert tokenizer_of(run, config) is None
    config.write_text("model_name_or_path: elsewhere\n")
    assert tokenizer_of(run, config) is None
    config.write_text(f"model_name_or_path: {model}\n")
    assert tokenizer_of(run, config) is not None
    assert tokenizer_of(run.model_copy(update={"imported_policies": ()}), config) is None
    shipped = run.model_copy(update={"config": {"model_name_or_path": "assets/demo/model"}})
    assert tokenizer_of(shipped, tmp_path / "none.yaml") is not None
