"""Tests the user's scorers before a run: each scores the right answer of one question.

Input: the open questions of a file, and the scorers. Output: notes, or the first scorer that
returns no number. A scorer that takes the rollout is given one that answers at once, with the run's
own tools. Built-in scorers, scorers that call a model and scorers of whole groups are skipped.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

from agentrl.config.sections import RootConfig
from agentrl.datasets.entries import folder_of
from agentrl.datasets.question import Question
from agentrl.datasets.question_files import QuestionFile
from agentrl.errors import ConfigError, ScorerDefect, ScorerTimeout, ScoringError, ToolError
from agentrl.rewards import MCPScorerFactory, Rollout
from agentrl.rewards.factory import Scorer, end_scorer_processes
from agentrl.rewards.rollout_view import answering_at_once
from agentrl.rollout.worker.resources import tools_to_start
from agentrl.rollout.world import ToolWorld
from agentrl.schema import GroundTruth
from agentrl.tools import connect_tools
from agentrl.tools.servers.served_question import ServedQuestion

TRIAL_SECONDS = 20.0
_MAX_SCANNED = 1000
_MAX_ANSWER_CHARS = 60


async def try_scorers(config: RootConfig, path: Path, questions: QuestionFile) -> list[str]:
    """Test each of the user's scorers on the first question that names it and has an answer."""
    notes = []
    try:
        for scorer, question in _trials(questions):
            if scorer.takes_rollout:
                async with _played(config, question, path) as rollout:
                    notes.append(await _try(scorer, question, path, rollout))
            else:
                notes.append(await _try(scorer, question, path))
    finally:
        await end_scorer_processes()
    return [note for note in notes if note]


@asynccontextmanager
async def _played(config: RootConfig, question: Question, path: Path) -> AsyncIterator[Rollout]:
    """Yield a rollout that gives the right answer at once, and its tools if there are any."""
    rollout = answering_at_once(_truth(question))
    tools = tools_to_start(config)
    if not tools.servers:
        yield rollout
        return
    served = ServedQuestion(question.id, "", question.columns, folder_of(path))
    connected = connect_tools(tools.model_copy(update={"example": served, "max_retries": 0}))
    try:
        async with connected as box, box.for_rollout(served) as own:
            with tempfile.TemporaryDirectory(prefix="agentrl-scored-") as folder:
                rollout.world = ToolWorld(own, Path(folder))
                yield rollout
    except ToolError as error:
        raise ConfigError(str(error)) from error


async def _try(
    scorer: Scorer, question: Question, path: Path, rollout: Rollout | None = None
) -> str:
    truth = _truth(question)
    try:
        async with asyncio.timeout(2 * TRIAL_SECONDS):
            await scorer.score(str(truth), truth, rollout=rollout, max_seconds=TRIAL_SECONDS)
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


def _truth(question: Question) -> GroundTruth:
    return GroundTruth(
        query=question.query,
        answer=question.answer,
        aug_answers=tuple(question.aug_answers),
        columns=dict(question.columns),
    )


def _trials(questions: QuestionFile) -> Iterator[tuple[Scorer, Question]]:
    scorers = map(MCPScorerFactory.get_scorer, sorted(questions.scorers))
    untested = {scorer.name: scorer for scorer in scorers if _is_testable(scorer)}
    # Only the first questions are used, because a file may have millions.
    for question in islice(questions, _MAX_SCANNED) if untested else ():
        scorer = untested.get(question.scorer)
        if scorer is not None and (question.answer is not None or scorer.takes_rollout):
            yield untested.pop(question.scorer), question


def _is_testable(scorer: Scorer) -> bool:
    needs_more = scorer.takes_config or scorer.needs_judge or scorer.sees_group
    # Functions written in C may have no module.
    return not needs_more and not str(getattr(scorer.function, "__module__", "")).startswith(
        "agentrl."
    )
