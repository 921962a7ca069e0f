"""The queries that README and docs print: they find something on a healthy run, and little for nothing."""

import json
import re
from typing import Any

import pytest
from support.doc_blocks import documented_queries
from support.stored import fill

from agentrl.schema import Run
from agentrl.store import TrajectoryStore

NUM_GROUPS = 30
MOST_EXAMINED = 10
"""Documents looked at for each one that is returned, or that goes into an aggregate."""

_CALL = re.compile(r"\.(\w+)\((.*?)\)(?=\.\w+\(|$)", re.DOTALL)
_KEY = re.compile(r"([{,]\s*)([\w$]+)(\s*:)")


def parsed(query: str) -> tuple[str, list[tuple[str, list[Any]]]]:
    """Return the collection of a statement of mongosh's, and its calls with their arguments."""
    found = re.fullmatch(r"db\.(\w+)(\..*)", query, re.DOTALL)
    assert found is not None, query
    calls = [
        (name, json.loads("[" + _KEY.sub(r'\1"\2"\3', arguments) + "]"))
        for name, arguments in _CALL.findall(found[2])
    ]
    return found[1], calls


def command_of(query: str) -> dict[str, Any]:
    """Return the command that mongosh sends for a statement."""
    collection, calls = parsed(query)
    (method, arguments), *further = calls
    if method == "find":
        filter_, projection = [*arguments, {}, {}][:2]
        options = {name: values[0] for name, values in further}
        return {"find": collection, "filter": filter_, "projection": projection, **options}
    if method == "countDocuments":
        count = {"$group": {"_id": 1, "n": {"$sum": 1}}}
        return {
            "aggregate": collection,
            "pipeline": [{"$match": arguments[0]}, count],
            "cursor": {},
        }
    return {"aggregate": collection, "pipeline": arguments[0], "cursor": {}}


def num_examined(plan: Any) -> int:
    """Return how many documents a plan looked at, those of look-ups included."""
    if isinstance(plan, list):
        return sum(map(num_examined, plan))
    if not isinstance(plan, dict):
        return 0
    if "executionStages" in plan:
        return int(plan["totalDocsExamined"])
    own = int(plan.get("totalDocsExamined", 0))
    return own + sum(map(num_examined, plan.values()))


@pytest.mark.parametrize("query", documented_queries())
async def test_a_documented_query_finds_rows_and_looks_at_little_else(
    healthy: TrajectoryStore, query: str
) -> None:
    command = command_of(query)
    reply = await healthy.database.handle.command(command)
    rows = reply["cursor"]["firstBatch"]
    assert rows, query
    used = len(rows)
    if "aggregate" in command:
        match = command["pipeline"][0]["$match"]
        used = await healthy.database[command["aggregate"]].count_documents(match)
    plan = await healthy.database.handle.command("explain", command, verbosity="executionStats")
    assert num_examined(plan) <= MOST_EXAMINED * used, query


async def test_a_filter_on_the_score_and_a_limit_go_before_the_look_ups_of_the_view(
    healthy: TrajectoryStore,
) -> None:
    command = command_of('db.v_trajectories.find({ "score.value": 1 }).limit(1)')
    plan = await healthy.database.handle.command("explain", command, verbosity="executionStats")
    assert num_examined(plan) <= 6  # the record, its question, its turns, its ledger


@pytest.fixture
async def healthy(store: TrajectoryStore) -> TrajectoryStore:
    """A run without any failure: groups that are trained, and some that nobody has played yet."""
    await store.runs.create(Run(name=store.database_name))
    ids = await fill(store, NUM_GROUPS, num_turns=2)
    await store.ledger.reserve("trainer", ids[:8], 1)
    await store.ledger.commit("trainer", 1)
    return store
