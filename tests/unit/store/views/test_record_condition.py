"""Conditions on records, as text, find the records that they describe."""

from datetime import datetime

import pytest
from support.stored import claim, make_task, play

from agentrl.errors import ConfigError
from agentrl.store import TrajectoryStore
from agentrl.store.views.record_condition import record_condition

DETAILS = ["judge: Timeout (30 s)", 'a "quoted" word', "all of it"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('score.detail ~ "timeout (30"', [0]),
        ('score.detail ~ ".*"', []),
        ('score.detail ~ "\\"quoted\\" word"', [1]),
        ("score < 0.5", [0]),
        ("score <= 0.5 and score > 0", [1]),
        ("score != none", [0, 1, 2]),
        ("final_answer = none", []),
        ("score.scorer = exact and score = 1", [2]),
        ("score.scored_at >= 2026-11-29T14:00", [1, 2]),
        ("score.scored_at < 2026-11-29T15:00:00+01:00", [0]),
        ("record = train/0/q0/0", [0]),
        ("task = train/0/q9", []),
    ],
)
async def test_a_condition_finds_its_records(
    store: TrajectoryStore, text: str, found: list[int]
) -> None:
    await store.tasks.add([make_task(0, num_generations=3)])
    ids = sorted([(await play(store, await claim(store))).id for _ in DETAILS])
    for number, detail in enumerate(DETAILS):
        values = {
            "score.detail": detail,
            "score.value": number / 2,
            "score.scored_at": datetime(2026, 11, 29, 13 + number),
        }
        await store.database["records"].update_one({"_id": ids[number]}, {"$set": values})
    tasks = [(await store.records.of_task(ids[0].rpartition("/")[0]))[0].task_id]
    expected = [ids[number] for number in found]
    assert await store.reports.matching(record_condition(text), tasks) == expected
    assert await store.reports.matching(record_condition(text), ["train/0/other"]) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not a condition on records; write FIELD OPERATOR VALUE"),
        ("timeout", "is not a condition on records"),
        ("score < 0.5 and", "is not a condition on records"),
        ("score < 0.5 or score > 1", "is not a condition on records"),
        ('score.detail ~ "open', "is not a condition on records"),
        ("scores < 1", "no field 'scores'; a condition names one of record, task, tool,"),
        ("$where = 1", "is not a condition on records"),
        ("score ~ 1", "score is a number; compare it with =, !=, <"),
        ("score.detail < a", "score.detail is a text; compare it with =, !=, ~"),
        ("score < high", "score is a number, and 'high' is none"),
        ("finished_at < noon", "finished_at is a time, and 'noon' is none"),
    ],
)
def test_a_mistake_is_named(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        record_condition(text)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
