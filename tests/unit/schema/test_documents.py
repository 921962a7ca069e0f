"""Frozen documents, task kinds and the transition table."""

from typing import ClassVar

import pytest
from pydantic import ValidationError

from agentrl.schema import (
    RECORD_TRANSITIONS,
    TASK_TYPES,
    TERMINAL_STATUSES,
    MCPTask,
    Task,
    register_task_type,
    utc_now,
)


def test_documents_are_frozen_and_ignore_foreign_keys() -> None:
    task = MCPTask.model_validate({"id": "t", "query": "q", "note": "by hand"})
    assert not hasattr(task, "note")
    with pytest.raises(ValidationError, match="frozen"):
        task.query = "other"  # type: ignore[misc]


@pytest.mark.parametrize("answer", [0, False, "", None])
def test_falsy_answers_are_kept(answer: object) -> None:
    assert MCPTask(id="t", query="q", answer=answer).answer is answer


def test_a_task_kind_is_registered_once() -> None:
    class Chess(Task):
        kind: ClassVar[str] = "chess-in-this-test"

    class Other(Task):
        kind: ClassVar[str] = "chess-in-this-test"

    try:
        assert register_task_type(Chess) is Chess
        assert register_task_type(Chess) is Chess
        with pytest.raises(ValueError, match="already registered by Chess"):
            register_task_type(Other)
    finally:
        del TASK_TYPES["chess-in-this-test"]


def test_nothing_leads_from_a_terminal_status_but_a_repaired_score() -> None:
    ends = {s for s, targets in RECORD_TRANSITIONS.items() if targets <= {"scored"}}
    assert ends == TERMINAL_STATUSES
    assert RECORD_TRANSITIONS["scored"] == frozenset()
    assert set().union(*RECORD_TRANSITIONS.values()) <= set(RECORD_TRANSITIONS)


def test_times_have_the_precision_of_the_database() -> None:
    now = utc_now()
    assert now.microsecond % 1000 == 0
    assert now.tzinfo is not None
