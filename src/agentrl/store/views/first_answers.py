"""What the model answers as it is: the first training attempts of a run, before any step.

The attempts are those that the first steps train on, so nothing is sampled twice. They show within
minutes whether there is anything to learn from: a model that is always wrong, always right, or never
answers gives every group equal scores.
"""

import textwrap
from collections import defaultdict

from agentrl.runtime.installation import typed_command
from agentrl.schema.base import Value
from agentrl.store.database import RunDatabase
from agentrl.store.documents.codec import Document
from agentrl.store.repositories.turns import TurnRepository
from agentrl.store.views.answer_figures import ANSWER_FIELDS, AnswerFigures, answer_figures, share
from agentrl.store.views.learning_signal import (
    NUM_EXAMPLES,
    ScoredAnswer,
    scored_answer,
    ways_to_a_signal,
)

MAX_ANSWERS = 512
"""Attempts that the report reads."""
_MAX_ERROR_CHARS = 300
_NEARLY_ALL = 0.8


class FirstAnswers(Value):
    """Figures of the scored training attempts of the starting weights."""

    run_name: str
    figures: AnswerFigures
    num_questions: int
    num_questions_above_0: int
    """Questions of which at least one attempt scored above 0."""
    num_per_question: tuple[int, int]
    """Fewest and most attempts at one question."""
    least_score: float
    most_score: float
    max_new_tokens: int | None = None
    agent_errors: tuple[str, ...] = ()
    """Of the attempts that ended with an exception of the agent."""
    examples: tuple[ScoredAnswer, ...] = ()

    @property
    def lacks_signal(self) -> bool:
        """Whether all answers score the same; a question with one answer shows nothing by that."""
        return self.least_score == self.most_score

    def __str__(self) -> str:
        """Return the figures, three answers as they came and, if needed, advice, as several lines."""
        figures, questions = self.figures, self.num_questions
        answers = figures.num_answers
        fewest, most = self.num_per_question
        attempts = f"pass@{most}" if fewest == most else f"in {fewest} to {most} attempts each"
        lines = [
            f"the first {answers} answers, to {questions} questions, before any training: mean score "
            f"{figures.mean_score:.3f}",
            f"  {share(figures.num_above_0, answers)} of the answers score above 0, "
            f"{share(self.num_questions_above_0, questions)} of the questions at least once "
            f"({attempts})",
            f"  an answer was found in {share(answers - figures.num_without_answer, answers)}; "
            f"{figures.lengths(self.max_new_tokens)}",
            *(f"  {example}" for example in self.examples),
        ]
        if errors := self.agent_errors:
            lines.insert(
                1,
                f"  {len(errors)} of {answers} attempts ended with an exception of the agent; the "
                f"last: {textwrap.shorten(errors[-1], _MAX_ERROR_CHARS)}",
            )
        if self.lacks_signal:
            lines += [
                "  all answers have the same score: there is nothing to learn from yet",
                *self._advice(),
            ]
        return "\n".join(lines)

    def _advice(self) -> list[str]:
        figures = self.figures
        if figures.num_above_0 == figures.num_answers:
            return ["  what to try: harder questions; these are answered correctly already"]
        if figures.num_without_answer > _NEARLY_ALL * figures.num_answers:
            run = ("--run_name", self.run_name)
            shown = typed_command("inspect", "record", self.examples[0].record_id, *run)
            first = (
                "hardly any reply has an answer: tell the model how to answer with --system_prompt, "
                f"or look for what it writes with --default_answer_schema; {shown}"
            )
        else:
            first = "compare the answers with the scorer: --default_scorer, --default_answer_schema"
        lines = [first, *ways_to_a_signal()]
        if figures.num_cut > figures.num_answers // 2:
            lines.append(
                "most replies were cut: raise --max_new_tokens if they are on the way to an answer"
            )
        return [f"  what to try: {line}" for line in lines]


async def read_first_answers(database: RunDatabase, turns: TurnRepository) -> FirstAnswers | None:
    """Return the report on the scored training attempts of policy version 0; None without any."""
    attempts: Document = {
        "status": "scored",
        "order": {"$gte": 0},
        "max_version": {"$in": [0, None]},
    }
    cursor = database.records.find(attempts, ANSWER_FIELDS)
    found = await cursor.sort([("order", 1), ("traj_id", 1)]).limit(MAX_ANSWERS).to_list()
    figures = answer_figures(found)
    if figures is None:
        return None
    scores = defaultdict(list)
    for record in found:
        scores[record["task_id"]].append(record["score"]["value"])
    every = [score for group in scores.values() for score in group]
    first_ids = {record["task_id"]: record["_id"] for record in reversed(found)}
    ids = [first_ids[task_id] for task_id in [*scores][:NUM_EXAMPLES]]
    examples = [
        await _example(document, turns)
        async for document in database.records.find({"_id": {"$in": ids}})
    ]
    run = await database.runs.find_one({}, {"config.max_new_tokens": 1}) or {}
    return FirstAnswers(
        run_name=database.name,
        figures=figures,
        num_questions=len(scores),
        num_questions_above_0=sum(max(group) > 0 for group in scores.values()),
        num_per_question=(min(map(len, scores.values())), max(map(len, scores.values()))),
        least_score=min(every),
        most_score=max(every),
        max_new_tokens=run.get("config", {}).get("max_new_tokens"),
        agent_errors=tuple(
            record["score"].get("detail", "").removeprefix("agent_error: ")
            for record in found
            if record.get("outcome") == "agent_error"
        ),
        examples=tuple(examples),
    )


async def _example(document: Document, turns: TurnRepository) -> ScoredAnswer:
    """Return a record as an example; without an answer, with what the model wrote instead."""
    found = scored_answer(document)
    if found.answer is not None:
        return found
    replies = await turns.of_record(found.record_id)
    return found.model_copy(update={"reply": replies[-1].output_text if replies else None})
