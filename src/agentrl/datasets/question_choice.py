"""Chooses the next question by the chance that the scores of its group differ.

A group of equal scores has no gradient. The chance follows from recent results:

    tags              share of their groups whose scores differed; drawn in proportion to its square,
                      so that none is given up
    then a question   one that was asked: success ~ Beta(s, f), from its own results and the mean of
                      its tags; chance = 1 - E[p^K] - E[(1 - p)^K] for K rollouts in a group
                      a new one: the share of its tags

Choosing prompts by such a posterior follows MoPPS (Qu et al. 2025, "Can Prompt Difficulty be Online
Predicted for Accelerating RL Finetuning of Reasoning Models?", arXiv 2507.04632).
"""

import asyncio
import heapq
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import exp, lgamma

from agentrl.schema import MCPTask, Task
from agentrl.schema.task import id_of_task
from agentrl.store import TrajectoryStore

_AHEAD = 256
"""New questions among which is chosen."""
_PRIOR_WEIGHT = 4.0
"""Rollouts that the mean of the tags counts as, beside a question's own."""
_HALF_LIFE_STEPS = 4
"""Steps after which a result counts half: the policy has changed."""
_REST_STEPS = 8
"""Steps before a question is asked again."""


@dataclass
class _GroupResults:
    """Aging sums over groups."""

    at: int = 0
    successes: float = 0.0
    failures: float = 0.0
    num_groups: float = 0.0
    num_differing: float = 0.0

    def aged(self, order: int, half_life: float) -> "_GroupResults":
        """Return the sums as they count at a later position in the run's stream."""
        share = 0.5 ** (max(0, order - self.at) / half_life)
        sums = (self.successes, self.failures, self.num_groups, self.num_differing)
        return _GroupResults(max(order, self.at), *(share * one for one in sums))

    @property
    def mean(self) -> float:
        """Expected success of a rollout."""
        return (1 + self.successes) / (2 + self.successes + self.failures)

    @property
    def share(self) -> float:
        """Expected share of groups whose scores differ."""
        return (1 + self.num_differing) / (2 + self.num_groups)


@dataclass
class _Asked:
    """A question that was asked."""

    tags: tuple[str, ...]
    num_generations: int
    can_return: bool
    """Whether it may be asked again; tasks of other kinds are asked as they are."""
    num_asked: int = 0
    last: int = 0
    """Position of its last group in the run's stream."""
    last_id: str = ""
    results: _GroupResults = field(default_factory=_GroupResults)


class QuestionChoice:
    """Makes as many tasks as a stream has, and chooses their questions by results."""

    def __init__(
        self, store: TrajectoryStore, tasks: Iterator[Task], groups_per_step: int, seed: int
    ) -> None:
        """Take nothing yet.

        Args:
            store: the run's; its groups are the results.
            tasks: tasks in order, the same at every start.
            groups_per_step: groups of a step, in which the age of results is counted.
            seed: of the draws.
        """
        self._store = store
        self._tasks = tasks
        self._seed = seed
        self._half_life = float(_HALF_LIFE_STEPS * groups_per_step)
        self._rest = _REST_STEPS * groups_per_step
        self._new: dict[str, Task] = {}
        self._asked: dict[str, _Asked] = {}
        self._of_tags: defaultdict[tuple[str, ...], _GroupResults] = defaultdict(_GroupResults)
        self._question_of: dict[str, str] = {}
        """Question of each group without results, by task id."""
        self._num_read = self._num_chosen = 0
        self._has_begun = self._has_ended = False
        self._lowest, self._highest = 0.0, 1.0

    async def take(self, count: int) -> Sequence[Task]:
        """Return the next tasks; fewer once as many are chosen as the stream has."""
        if not self._has_begun:
            async for task in self._store.tasks.find(split="train"):
                self._note_asked(task, task.order)
                self._num_chosen += task.expected_signal is not None
            self._has_begun = True
        await self._read_results()
        await self._read_ahead(self._num_chosen + count + _AHEAD)
        order = await self._store.tasks.next_train_order()
        count = min(count, self._num_read - self._num_chosen)
        tasks: list[Task] = []
        while len(tasks) < count:
            chosen = self._best(order, count - len(tasks))
            last_ids = [self._asked[name].last_id for name, _ in chosen if name not in self._new]
            known = [*await self._store.tasks.get_many(last_ids), *tasks]
            last = {_question(task): task for task in known}
            for name, chance in chosen:
                task = self._new[name] if name in self._new else self._again(last[name])
                tasks.append(task.model_copy(update={"expected_signal": round(chance, 4)}))
                self._note_asked(task, order)
                order += 1
        self._num_chosen += count
        return tasks

    async def _read_ahead(self, until: int) -> None:
        missing = until - self._num_read
        if missing <= 0 or self._has_ended:
            return
        batch = await asyncio.to_thread(list, islice(self._tasks, missing))
        self._has_ended = len(batch) < missing
        self._num_read += len(batch)
        for task in batch:
            if (name := _question(task)) not in self._asked:
                self._new.setdefault(name, task)

    async def _read_results(self) -> None:
        """Count the groups that are complete by now."""
        found = await self._store.tasks.group_scores([*self._question_of])
        for task_id, (order, scores) in sorted(found.items(), key=lambda item: item[1][0]):
            asked = self._asked[self._question_of.pop(task_id)]
            if not scores:
                continue
            self._lowest = min(self._lowest, *scores)
            self._highest = max(self._highest, *scores)
            asked.results = self._with(asked.results, order, scores)
            self._of_tags[asked.tags] = self._with(self._of_tags[asked.tags], order, scores)

    def _with(self, results: _GroupResults, order: int, scores: Sequence[float]) -> _GroupResults:
        new = results.aged(order, self._half_life)
        successes = sum((one - self._lowest) / (self._highest - self._lowest) for one in scores)
        new.successes += successes
        new.failures += len(scores) - successes
        new.num_groups += 1
        new.num_differing += min(scores) < max(scores)
        return new

    def _best(self, order: int, count: int) -> list[tuple[str, float]]:
        """Draw tags, and return the questions of the highest chances among them, with these."""
        of_tags: defaultdict[tuple[str, ...], _GroupResults] = defaultdict(_GroupResults)
        of_tags |= {tags: one.aged(order, self._half_life) for tags, one in self._of_tags.items()}
        found: defaultdict[tuple[str, ...], list[tuple[float, int, str]]] = defaultdict(list)
        for number, (name, task) in enumerate(islice(self._new.items(), max(_AHEAD, count))):
            tags = _tags(task)
            found[tags].append((of_tags[tags].share, -number, name))
        for name, asked in self._to_ask_again(order, 0 if found else count):
            own, mean = asked.results.aged(order, self._half_life), of_tags[asked.tags].mean
            chance = chance_to_differ(
                own.successes + _PRIOR_WEIGHT * mean,
                own.failures + _PRIOR_WEIGHT * (1 - mean),
                asked.num_generations,
            )
            found[asked.tags].append((chance, -asked.last, name))
        for candidates in found.values():
            candidates.sort()
        best: list[tuple[str, float]] = []
        draw = random.Random(f"{self._seed}/{order}")
        while found and len(best) < count:
            (tags,) = draw.choices([*found], [of_tags[one].share ** 2 for one in found])
            chance, _, name = found[tags].pop()
            best.append((name, chance))
            if not found[tags]:
                del found[tags]
        return best

    def _to_ask_again(self, order: int, at_least: int) -> list[tuple[str, _Asked]]:
        """Return the questions that have rested, or those asked longest ago."""
        asked = [(name, one) for name, one in self._asked.items() if one.can_return]
        rest = min(self._rest, (len(self._new) + len(asked)) // 2)
        in_flight = {*self._question_of.values()}
        rested = [
            (name, one) for name, one in asked if name not in in_flight and order - one.last >= rest
        ]
        return rested or heapq.nsmallest(at_least, asked, key=lambda item: item[1].last)

    def _again(self, task: Task) -> Task:
        """Return the task that asks a question once more."""
        name = _question(task)
        epoch = self._asked[name].num_asked
        return task.again(id_of_task("train", epoch, name), epoch=epoch)

    def _note_asked(self, task: Task, order: int) -> None:
        name = _question(task)
        self._new.pop(name, None)
        first = _Asked(_tags(task), task.num_generations, isinstance(task, MCPTask))
        asked = self._asked.setdefault(name, first)
        asked.num_asked += 1
        asked.last, asked.last_id = order, task.id
        self._question_of[task.id] = name


def _question(task: Task) -> str:
    return (isinstance(task, MCPTask) and task.dataset_id) or task.id


def _tags(task: Task) -> tuple[str, ...]:
    return task.tags if isinstance(task, MCPTask) else ()


def chance_to_differ(successes: float, failures: float, num_rollouts: int) -> float:
    """Return the chance that K rollouts do not all succeed or all fail.

    Args:
        successes: first parameter of the Beta distribution of success, above 0.
        failures: its second parameter, above 0.
        num_rollouts: K.
    """
    both = successes + failures

    def all_alike(count: float) -> float:
        """E[p^K] = B(a + K, b) / B(a, b)."""
        return exp(
            lgamma(count + num_rollouts)
            - lgamma(count)
            + lgamma(both)
            - lgamma(both + num_rollouts)
        )

    return 1 - all_alike(successes) - all_alike(failures)
