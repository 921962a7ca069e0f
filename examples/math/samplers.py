"""Two samplers without tools: one makes a single call, the other's attempts learn from each other.

    python examples/math/samplers.py [--notes] --run_name RUN --train_file problems.jsonl [flags]

samples beside a training run. A line of the file is `{"id": ..., "problem": ..., "answer": ...}`.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from agentrl.config.command_line import parse_flags
from agentrl.rewards import GroundTruth, MCPScorerFactory, extract_answer
from agentrl.rollout import (
    AsyncSampler,
    Conversation,
    RolloutResult,
    SamplingScheduler,
    register_task_type,
)
from agentrl.schema import Score, Task

INSTRUCTION = "Solve the problem. Think step by step and give the answer in \\boxed{}."
ASK_FOR_NOTE = (
    "Write one short note for somebody who is about to try the same problem: what helped, and "
    "what to avoid. Do not give the answer away."
)
MOST_NOTES = 3


@register_task_type
class MathTask(Task):
    """A problem with a short answer."""

    kind = "math"

    problem: str
    answer: str
    subject: str = ""


class MathSampler(AsyncSampler[MathTask]):
    """Makes one model call; `math-verify` scores the answer."""

    async def run(self) -> RolloutResult:
        """Let the model solve the problem in one reply."""
        _, reply = await self.generate(Conversation(self.messages()))
        answer = extract_answer(reply.content, "boxed")
        return RolloutResult("no_answer" if answer is None else "answered", answer)

    async def evaluate_record(self, result: RolloutResult) -> Score:
        """Compare the answer with the reference as mathematics."""
        truth = GroundTruth(query=self.task.problem, answer=self.task.answer)
        return await MCPScorerFactory.get_scorer("math").score(result.final_answer, truth)

    def messages(self) -> list[dict[str, object]]:
        """Return the prompt."""
        return [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": self.task.problem},
        ]


class NotesSampler(MathSampler):
    """Shows an attempt the notes of earlier attempts at the same problem, and asks it for a note.

    The state is in the database, with the turns that produced it: a note is the last reply of a scored
    attempt. Attempts may run in any number of processes, which may crash at any time.
    """

    async def run(self) -> RolloutResult:
        """Solve the problem with the existing notes, then write the next one."""
        opening = self.messages()
        notes = await self.notes()
        if notes:
            listed = "\n".join(f"- {note}" for note in notes)
            opening[-1]["content"] = f"{self.task.problem}\n\nNotes of earlier tries:\n{listed}"
        conversation = Conversation(opening)
        _, reply = await self.generate(conversation)
        answer = extract_answer(reply.content, "boxed")
        conversation.add({"role": "user", "content": ASK_FOR_NOTE})
        await self.generate(conversation, max_new_tokens=200)
        return RolloutResult("no_answer" if answer is None else "answered", answer)

    async def notes(self) -> list[str]:
        """Return the notes of the best attempts so far."""
        store = self.context.store
        scored = [r for r in await store.records.of_task(self.task.id) if r.score is not None]
        scored.sort(key=lambda record: record.score.value if record.score else 0.0, reverse=True)
        last_turns = [record.turns[-1] for record in scored[:MOST_NOTES]]
        return [turn.output_text.strip() for turn in await store.turns.get_many(last_turns)]


def problems(path: Path, num_generations: int) -> Iterator[MathTask]:
    """Yield a task for each line of a file."""
    with path.open(encoding="utf-8") as file:
        for order, line in enumerate(file):
            problem = json.loads(line)
            yield MathTask(
                id=f"train/0/{problem['id']}",
                order=order,
                num_generations=num_generations,
                problem=problem["problem"],
                answer=str(problem["answer"]),
            )


def main(argv: list[str]) -> int:
    """Sample the problems of `--train_file`."""
    sampler = NotesSampler if "--notes" in argv else MathSampler
    config = parse_flags([word for word in argv if word != "--notes"])
    if config.data.train_file is None:
        raise SystemExit("--train_file is missing")
    tasks = problems(config.data.train_file, config.data.num_generations)
    return asyncio.run(SamplingScheduler(config, sampler, tasks, "train").run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
