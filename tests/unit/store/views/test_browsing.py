from typing import Any

import pytest
from pymongo import AsyncMongoClient
from support.inspected import HOSTILE_RECORD, seed
from support.stored import claim, fill, make_task, make_turn, play
from unit.store.collections.test_indexes import Commands, stages

from agentrl.errors import ConfigError
from agentrl.schema import Split, ToolCall
from agentrl.store import TrajectoryStore
from agentrl.store.views.browsing import GroupFilter, GroupPage, Place

PAGES: list[GroupFilter] = [
    GroupFilter(),
    GroupFilter(min_spread=0.5),
    GroupFilter(outcome="answered", min_score=0.5, max_score=1.0, version=0, min_attempts=1),
    GroupFilter(tag="counting"),
    GroupFilter(column="shelf=1", min_score=0.5),
    GroupFilter(tool="lookup", min_tokens=10),
    GroupFilter(text="zloty"),
    GroupFilter(text="answer 3", tag="counting", tool="lookup"),
]


def ids(page: GroupPage) -> list[str]:
    return [group.task_id for group in page.groups]


async def test_pages_follow_the_run_both_ways_without_a_gap(store: TrajectoryStore) -> None:
    await fill(store, 7)
    seen: list[str] = []
    place: Place | None = None
    while True:
        page = await store.browse.groups(GroupFilter(), limit=3, after=place)
        seen += ids(page)
        place = page.next
        if place is None:
            break
    assert seen == [f"train/0/q{number}" for number in range(7)]
    newest = await store.browse.groups(
        GroupFilter(), limit=3, newest=True, after=Place(5, "train/0/q5")
    )
    assert ids(newest) == ["train/0/q4", "train/0/q3", "train/0/q2"]


async def test_groups_are_filtered_by_what_one_try_did(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0), make_task(1), make_task(2)])
    for score in (0.0, 1.0, 1.0, 1.0, 0.0, 0.0):
        await play(store, await claim(store), score=score, version=int(score))

    async def found(**wanted: Any) -> list[str]:
        return ids(await store.browse.groups(GroupFilter(**wanted), limit=9))

    assert await found(min_spread=1.0) == ["train/0/q0"]
    assert await found(min_score=0.5) == ["train/0/q0", "train/0/q1"]
    assert await found(max_score=0.5) == ["train/0/q0", "train/0/q2"]
    assert await found(version=1) == ["train/0/q0", "train/0/q1"]
    assert await found(outcome="answered", min_attempts=2) == []
    assert await found(min_tokens=100) == ["train/0/q0", "train/0/q1", "train/0/q2"]
    assert await found(min_tokens=10_000) == []


async def test_a_try_without_a_score_fits_no_bound_of_scores(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0, num_generations=1)])
    record = await claim(store)
    await store.records.fail_attempt(record.id, record.fence, "gone", 1)
    page = await store.browse.groups(GroupFilter(max_score=0.5), limit=9)
    assert ids(page) == []


async def test_groups_are_found_by_tool_tag_and_text(store: TrajectoryStore) -> None:
    await seed(store, store.database_name)
    for wanted in (GroupFilter(tag="counting"), GroupFilter(tag="counting", tool="lookup")):
        assert ids(await store.browse.groups(wanted, limit=9)) == ["train/0/q1"]
    assert len(ids(await store.browse.groups(GroupFilter(tool="lookup"), limit=9))) == 3
    assert ids(await store.browse.groups(GroupFilter(tool="other"), limit=9)) == []
    by_answer = GroupFilter(text="answer 3")
    assert ids(await store.browse.groups(by_answer, limit=9)) == ["train/0/q1"]


async def test_groups_are_found_by_a_column_of_their_question(store: TrajectoryStore) -> None:
    columns: list[dict[str, Any]] = [
        {"kind": "close", "n": 3, "of": {"project": "web"}},
        {"kind": "3", "labels": ["ui", "late"], "done": True},
        {},
    ]
    tasks = [make_task(number) for number in range(3)]
    await store.tasks.add(
        [one.model_copy(update={"columns": own}) for one, own in zip(tasks, columns, strict=True)]
    )

    async def found(condition: str) -> list[int]:
        page = await store.browse.groups(GroupFilter(column=condition), limit=9)
        return [group.order for group in page.groups]

    assert await found("kind=close") == [0]
    assert await found(" of.project = web ") == [0]
    assert await found("n=3") == [0]
    assert await found("n=3.0") == [0]
    assert await found("kind=3") == [1]
    assert await found("labels=late") == [1]
    assert await found("done=true") == [1]
    for other in ("kind=Close", "kind=", "none=1", "n={}", 'kind={"$gt": ""}', "n=" + "9" * 5000):
        assert await found(other) == []
    for wrong in ("kind", "=close", "$where=1", "a\0=1"):
        with pytest.raises(ConfigError, match="give NAME=VALUE"):
            await found(wrong)


async def test_the_newest_groups_are_those_that_were_begun_last(store: TrajectoryStore) -> None:
    await fill(store, 2)
    later = [make_task(number) for number in range(2, 6)]
    await store.tasks.add([*later, make_task(0, split="eval"), make_task(1, split="eval")])

    async def newest(split: Split) -> list[int]:
        page = await store.browse.groups(GroupFilter(split=split), limit=9, newest=True)
        return [group.order for group in page.groups]

    assert (await newest("train"), await newest("eval")) == ([1, 0], [])
    record = await claim(store)
    assert (record.split, await newest("eval")) == ("eval", [record.order])


async def test_a_new_attempt_forgets_the_tools_of_the_last(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    call = ToolCall(id="c", name="lookup")
    await store.turns.append(make_turn(record, 0, tool_calls=[call, call]), record.fence)
    first = await store.records.get(record.id)
    assert first is not None
    assert first.tool_names == ("lookup",)
    await store.records.fail_attempt(record.id, record.fence, "gone", 3)
    assert (await claim(store)).tool_names == ()


async def test_search_finds_words_and_phrases_and_says_what_is_not_indexed(
    store: TrajectoryStore,
) -> None:
    await seed(store, store.database_name)
    judged = await store.browse.search("MARVELLOUS judge", limit=9)
    assert {one.kind for one in judged.found} == {"judge"}
    assert len(judged.found) == 4
    assert not judged.has_turn_words
    phrase = await store.browse.search('"answer 3"', limit=9)
    assert [one.record_id for one in phrase.found] == ["train/0/q1/1"]
    assert (await store.browse.search('"3 answer"', limit=9)).found == ()
    await store.browse.index_turns()
    turns = await store.browse.search("zloty", limit=3)
    assert turns.has_turn_words
    assert turns.is_cut
    assert {(one.kind, one.turn) for one in turns.found} == {("tool", 0)}


async def test_no_text_is_too_strange_to_search_for(store: TrajectoryStore) -> None:
    for text in ("", '"', "-answer", "$where", "\\", '"unfinished', "\0", "\ud800"):
        assert (await store.browse.search(text, limit=9)).found == ()


async def test_no_page_scans_a_collection(store: TrajectoryStore, mongo_uri: str) -> None:
    await seed(store, store.database_name)
    await store.browse.index_turns()
    commands = Commands()
    async with AsyncMongoClient[dict[str, Any]](
        mongo_uri, event_listeners=[commands], tz_aware=True
    ) as client:
        listened = TrajectoryStore.from_client(client)
        for wanted in PAGES:
            for newest in (False, True):
                await listened.browse.groups(wanted, limit=2, newest=newest)
        await listened.browse.rows(["train/0/q0"])
        await listened.browse.answers(["train/0/q0"])
        await listened.figures.steps("trainer", ("loss",), after=1)
        await listened.figures.last_steps("trainer", 2)
        await listened.figures.evaluations("trainer")
        await listened.lineage.records_of_step(1)
        await listened.turns.of_records([HOSTILE_RECORD])
    for command in commands.heard:
        if next(iter(command.values())) == "runs":
            continue
        plan = await store.database.handle.command(
            {"explain": command, "verbosity": "queryPlanner"}
        )
        assert "COLLSCAN" not in set(stages(plan)), command


async def test_a_stretch_of_the_run_is_filtered_from_keys_alone(
    store: TrajectoryStore, mongo_uri: str
) -> None:
    await fill(store, 3)
    commands = Commands()
    async with AsyncMongoClient[dict[str, Any]](
        mongo_uri, event_listeners=[commands], tz_aware=True
    ) as client:
        await TrajectoryStore.from_client(client).browse.groups(PAGES[2], limit=2)
    (command,) = [one for one in commands.heard if next(iter(one)) == "aggregate"]
    plan = await store.database.handle.command({"explain": command, "verbosity": "queryPlanner"})
    assert "FETCH" not in set(stages(plan))
