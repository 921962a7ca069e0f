"""What the model answers as it is: the first training attempts of a run, before any step.

The attempts are those that the first steps train on, so nothing is sampled twice. They show within
minutes whether there is anything to learn from: a model that is always wrong, always right, or never
answers gives every group equal scores.
"""

from agentrl.runtime.invocation import typed_command
from agentrl.schema.base import Value
from agentrl.store.database import RunDatabase
from agentrl.store.documents.codec import Document
from agentrl.store.views.learning_signal import (
    NUM_EXAMPLES,
    ScoredAnswer,
    scored_answer,
    ways_to_a_signal,
)

MAX_ANSWERS = 512
"""Attempts that the report reads."""


class FirstAnswers(Value):
    """Figures of the scored training attempts of the starting weights."""

    run_name: str
    num_answers: int
    num_questions: int
    mean_score: float
    num_scored_above_0: int
    num_questions_above_0: int
    """Questions of which at least one attempt scored above 0."""
    least_score: float
    most_score: float
    num_without_answer: int
    """Attempts in which no answer was found."""
    num_cut: int
    """Attempts that a limit on tokens ended."""
    median_tokens: int
    longest_tokens: int
    examples: tuple[ScoredAnswer, ...] = ()

    @property
    def lacks_signal(self) -> bool:
        """Whether all answers score the same; a question with one answer shows nothing of its own."""
        return self.least_score == self.most_score

    def __str__(self) -> str:
        """Return the figures, three answers as they came and, if needed, advice, as several lines."""
        answers, questions = self.num_answers, self.num_questions
        per_question = max(1, round(answers / questions))
        lines = [
            f"the first {answers} answers, to {questions} questions, before any training: mean score "
            f"{self.mean_score:.3f}",
            f"  {_share(self.num_scored_above_0, answers)} of the answers score above 0, "
            f"{_share(self.num_questions_above_0, questions)} of the questions at least once "
            f"(pass@{per_question})",
            f"  an answer was found in {_share(answers - self.num_without_answer, answers)}; "
            f"{_share(self.num_cut, answers)} reached the limit of tokens; tokens: median "
            f"{self.median_tokens}, longest {self.longest_tokens}",
            *(f"  {example}" for example in self.examples),
        ]
        if self.lacks_signal:
            lines += [
                "  all answers have the same score: there is nothing to learn from yet",
                *self._advice(),
            ]
        return "\n".join(lines)

    def _advice(self) -> list[str]:
        run = ("--run_name", self.run_name)
        if self.num_scored_above_0 == self.num_answers:
            return ["  what to try: harder questions; these are answered correctly already"]
        if self.num_without_answer == self.num_answers:
            shown = typed_command("inspect", "record", self.examples[0].record_id, *run)
            first = (
                "no answer was found in any reply: tell the model how to answer with --system_prompt, "
                f"or look for what it writes with --default_answer_schema; {shown}"
            )
        else:
            first = "compare the answers with the scorer: --default_scorer, --default_answer_schema"
        lines = [first]
        if self.num_cut > self.num_answers // 2:
            lines.append("most replies were cut: raise --max_new_tokens")
        return [f"  what to try: {line}" for line in (*lines, *ways_to_a_signal())]


async def read_first_answers(database: RunDatabase) -> FirstAnswers | None:
    """Return the report on the scored training attempts of policy version 0; None without any."""
    is_above: Document = {"$gt": ["$score.value", 0]}
    found = await database.aggregate(
        database.records,
        [
            {
                "$match": {
                    "status": "scored",
                    "order": {"$gte": 0},
                    "max_version": {"$in": [0, None]},
                }
            },
            {"$sort": {"order": 1, "traj_id": 1}},
            {"$limit": MAX_ANSWERS},
            {
                "$group": {
                    "_id": "$task_id",
                    "num": {"$sum": 1},
                    "sum": {"$sum": "$score.value"},
                    "above": {"$sum": {"$toInt": is_above}},
                    "least": {"$min": "$score.value"},
                    "most": {"$max": "$score.value"},
                    "without": {"$sum": {"$toInt": {"$eq": [{"$type": "$final_answer"}, "null"]}}},
                    "cut": {"$sum": {"$toInt": {"$eq": ["$outcome", "length_limit"]}}},
                    "tokens": {"$push": "$num_output_tokens"},
                    "first": {"$first": "$$ROOT._id"},
                    "order": {"$first": "$order"},
                }
            },
            {"$sort": {"order": 1}},
        ],
    )
    if not found:
        return None
    tokens = sorted(number for group in found for number in group["tokens"])
    ids = [group["first"] for group in found[:NUM_EXAMPLES]]
    examples = [document async for document in database.records.find({"_id": {"$in": ids}})]
    return FirstAnswers(
        run_name=database.name,
        num_answers=len(tokens),
        num_questions=len(found),
        mean_score=sum(group["sum"] for group in found) / len(tokens),
        num_scored_above_0=sum(group["above"] for group in found),
        num_questions_above_0=sum(group["above"] > 0 for group in found),
        least_score=min(group["least"] for group in found),
        most_score=max(group["most"] for group in found),
        num_without_answer=sum(group["without"] for group in found),
        num_cut=sum(group["cut"] for group in found),
        median_tokens=tokens[len(tokens) // 2],
        longest_tokens=tokens[-1],
        examples=tuple(scored_answer(document) for document in examples),
    )


def _share(number: int, total: int) -> str:
    return f"{100 * number / total:.0f} %"
