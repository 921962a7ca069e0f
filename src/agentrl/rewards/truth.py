"""What an answer is held against."""

import json
from typing import Any

from agentrl.schema import MCPTask
from agentrl.schema.base import Value


class GroundTruth(Value):
    """The question and the answers that count as right."""

    query: str
    answer: Any = None
    """The reference answer; `0` and `False` are answers, None means there is none."""
    aug_answers: tuple[Any, ...] = ()
    """Further answers that count as right."""

    @classmethod
    def of(cls, task: MCPTask) -> "GroundTruth":
        """Return the truth that a task carries."""
        return cls(query=task.query, answer=task.answer, aug_answers=task.aug_answers)

    @property
    def accepted(self) -> tuple[str, ...]:
        """All right answers as text, in the spelling of JSON where they are not strings."""
        given = (self.answer, *self.aug_answers)
        return tuple(_as_text(answer) for answer in given if answer is not None)


def _as_text(answer: object) -> str:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # tables turn a column of integers with a gap in it into floats
    return json.dumps(answer, ensure_ascii=False)
