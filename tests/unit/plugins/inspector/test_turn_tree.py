"""The rows of a group's turns: branches stand below the record whose turn they continue."""

from typing import Any

from harness.trees import make_record, make_turn

from agentrl.plugins.inspector.turn_tree import excerpt, turn_tree
from agentrl.schema import BranchPoint, DBRecordData, ToolCall

TASK = "train/0/q0"


def played(traj_id: int, score: float | None, num_turns: int, *left: int) -> DBRecordData:
    """A record that leaves record `left[0]` at turn `left[1]`, if given."""
    record_id = f"{TASK}/{traj_id}"
    turns = [make_turn(record_id, index, [1], [2]) for index in range(num_turns)]
    turns[0] = turns[0].model_copy(
        update={"tool_calls": (ToolCall(id="c", name="price", arguments={"item": "figs"}),)}
    )
    changes: dict[str, Any] = {"round": 0}
    if left:
        point = BranchPoint(record_id=f"{TASK}/{left[0]}", attempt=1, turn=left[1], rule="random")
        changes = {"round": 1, "branch": point}
    return make_record(turns, score, traj_id=traj_id, task_id=TASK).model_copy(update=changes)


def test_a_branch_stands_below_the_record_that_sampled_the_turn_it_continues() -> None:
    records = [
        played(0, 1.0, 4),
        played(1, 0.0, 2),
        played(2, 0.0, 4, 0, 1),
        played(3, 0.0, 4, 0, 3),
        # Record 3 has a copy of the turn that this one continues.
        played(4, None, 4, 3, 2),
    ]
    rows = turn_tree(records, {f"{TASK}/0/1/3": 0.25})
    assert rows is not None
    assert [(row["traj_id"], row["parent"], row["shared"]) for row in rows] == [
        (0, None, 0),
        (3, 0, 3),
        (4, 0, 2),
        (2, 0, 1),
        (1, None, 0),
    ]
    assert [[turn["index"] for turn in row["turns"]] for row in rows] == [
        [0, 1, 2, 3],
        [3],
        [2, 3],
        [1, 2, 3],
        [0, 1],
    ]
    first, last = rows[0]["turns"][0], rows[0]["turns"][-1]
    assert first["text"] == "price(figs)"
    assert first["credit"] is None
    assert first["worth"]["num_leaves"] == 3
    assert last["credit"] == 0.25
    assert last["worth"]["change"] == 0.5
    assert rows[2]["turns"][0]["worth"] is None
    malformed = ToolCall(id="c", name="", format_error="no name")
    turn = records[0].turns[0].model_copy(update={"tool_calls": (malformed,), "output_text": "{}"})
    assert excerpt(turn) == "{}"
    assert turn_tree(records[:2], {}) is None
