"""Tests the user's scorers before a run: each scores the right answer of one question.

Input: the open questions of a file, and the scorers. Output: notes, or the first scorer that
returns no number. Built-in scorers, scorers that call a model and scorers of whole groups are
skipped.
"""

import asyncio
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from agentrl.datasets.question import Question
from agentrl.datasets.question_files import QuestionFile
from agentrl.errors import ConfigError, ScorerDefect, ScorerTimeout, ScoringError
from agentrl.rewards import MCPScorerFactory
from agentrl.rewards.factory import Scorer, end_scorer_processes
from agentrl.schema import GroundTruth

TRIAL_SECONDS = 20.0
_MAX_SCANNED = 1000
_MAX_ANSWER_CHARS = 60


async def try_scorers(path: Path, questions: QuestionFile) -> list[str]:
    """Test each of the user's scorers on the first question that names it and has an answer."""
    try:
        notes = [await _try(scorer, question, path) for scorer, question in _trials(questions)]
    finally:
        await end_scorer_processes()
    return [note for note in notes if note]


async def _try(scorer: Scorer, question: Question, path: Path) -> str:
    truth = GroundTruth(
        query=question.query, answer=question.answer, aug_answers=tuple(question.aug_answers)
    )
    try:
        async with asyncio.timeout(2 * TRIAL_SECONDS):
            await scorer.score(str(truth), truth, max_seconds=TRIAL_SECONDS)
    except (ScoringError, TimeoutError) as error:
        if isinstance(error, ScorerDefect) and not isinstance(error, ScorerTimeout):
            answer = repr(str(truth)[:_MAX_ANSWER_CHARS])
            raise ConfigError(
                f"{error}; it was called with the correct answer {answer} of question "
                f"{question.id!r} in {path}; a scorer must return a number for any text"
            ) from error
        reason = str(error) or f"no score within {TRIAL_SECONDS:g} s"
        return f"scorer {scorer.name!r} could not be tested: {reason}"
    return ""


def _trials(questions: QuestionFile) -> Iterator[tuple[Scorer, Question]]:
    scorers = map(MCPScorerFactory.get_scorer, sorted(questions.scorers))
    untested = {scorer.name: scorer for scorer in scorers if _is_testable(scorer)}
    # Only the first questions are used, because a file may have millions.
    for question in islice(questions, _MAX_SCANNED) if untested else ():
        if question.scorer in untested and question.answer is not None:
            yield untested.pop(question.scorer), question


def _is_testable(scorer: Scorer) -> bool:
    needs_more = scorer.takes_config or scorer.needs_judge or scorer.sees_group
    # Functions written in C may have no module.
    return not needs_more and not str(getattr(scorer.function, "__module__", "")).startswith(
        "agentrl."
    )
