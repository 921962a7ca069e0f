"""`--env sums:addition?size=64`: as many sums, drawn with the run's seed."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from agentrl.config.sections import DataSection
from agentrl.datasets.question import question_of
from agentrl.datasets.task_stream import tasks_from_questions
from agentrl.errors import ConfigError
from agentrl.schema import MCPTask, Split


class Sums:
    """A source of tasks; see `agentrl.datasets.task_source.TaskSource`."""

    starts_programs = False

    def can_branch(self, uri: str, flag: str) -> bool:
        """Return True: the built-in sampler plays the sums."""
        return True

    def num_tasks(self, uri: str, config: DataSection, flag: str) -> int:
        """Return the number of sums that the user asked for."""
        size = parse_qs(urlsplit(uri).query).get("size", ["64"])[0]
        if not size.isdecimal() or not 0 < int(size) <= 1_000_000:
            raise ConfigError(f"{flag} {uri}: size is a number from 1 to 1000000")
        return int(size)

    def tasks(
        self, uri: str, config: DataSection, split: Split, *, seed: int, **stream: Any
    ) -> Iterator[MCPTask]:
        """Yield the sums as ordinary questions, which the built-in sampler plays."""
        questions = []
        for number, (text, answer) in enumerate(sums(self.num_tasks(uri, config, "--env"), seed)):
            entry = {"id": f"sum-{seed}-{number}", "question": text, "answer": answer}
            questions.append(question_of(entry, config, f"sum {number}", Path()))
        yield from tasks_from_questions(questions, split, **stream)

    def samplers(self, config: DataSection, endpoints: Any) -> AbstractContextManager[Any]:
        """Never called: only tasks that play themselves need samplers of their own."""
        raise NotImplementedError


def sums(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield questions and answers."""
    draw = random.Random(seed)
    for _ in range(count):
        one, other = draw.randrange(10, 100), draw.randrange(10, 100)
        yield f"What is {one} + {other}?", str(one + other)


SUMS = Sums()
