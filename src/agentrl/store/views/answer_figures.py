"""Figures of scored answers: how many score, how many were cut or hold no answer, how long they are."""

from collections.abc import Sequence
from typing import Any

from agentrl.schema.base import Value
from agentrl.store.documents.codec import Document

ANSWER_FIELDS = dict.fromkeys(
    ("task_id", "score.value", "score.detail", "final_answer", "outcome", "num_output_tokens"), 1
)
"""Projection of the Records that `answer_figures` reads."""


class AnswerFigures(Value):
    """Figures of some scored training rollouts."""

    num_answers: int
    mean_score: float
    num_above_0: int
    """Answers that score above 0."""
    num_without_answer: int
    """Rollouts in which no answer was found."""
    num_cut: int
    """Rollouts that a limit on tokens ended."""
    median_tokens: int
    longest_tokens: int

    def lengths(self, limit: int | None) -> str:
        """Return the share of cut rollouts and the lengths as text."""
        shown = "" if limit is None else f" (--max_new_tokens {limit} a reply)"
        return (
            f"{share(self.num_cut, self.num_answers)} reached the limit of tokens; tokens: median "
            f"{self.median_tokens}, longest {self.longest_tokens}{shown}"
        )


def answer_figures(records: Sequence[Document]) -> AnswerFigures | None:
    """Return the figures of scored Records with `ANSWER_FIELDS`; None without any."""
    if not records:
        return None
    scores = [record["score"]["value"] for record in records]
    tokens: list[Any] = sorted(record["num_output_tokens"] for record in records)
    return AnswerFigures(
        num_answers=len(records),
        mean_score=sum(scores) / len(scores),
        num_above_0=sum(score > 0 for score in scores),
        num_without_answer=sum(record.get("final_answer") is None for record in records),
        num_cut=sum(record.get("outcome") == "length_limit" for record in records),
        median_tokens=tokens[len(tokens) // 2],
        longest_tokens=tokens[-1],
    )


def share(number: int, total: int) -> str:
    """Return a part of a total as percent."""
    return f"{100 * number / total:.0f} %"
