"""The decisions that a run stored, and what else could have been decided in their places.

A *decision* is one sampled turn: a call of a tool, or an answer in words. Its *place* is the context
in which it chose: the prompt and, of the reply, the thinking and the words before a call, as they were
sampled. A reply that ends in its thinking decides nothing. At each place, a *beginning* stands for the
call of every tool that the model was shown: the tokens of its format up to the end of the tool's name.
Their probabilities under any weights are those of the choice, without sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from agentrl.algorithms.advantages import RIGHT_ABOVE
from agentrl.data.tokens import TurnTokens, turn_tokens
from agentrl.errors import ConfigError
from agentrl.renderers.renderer import Renderer
from agentrl.schema import DispatchedSamplingTask, MCPTask, Record
from agentrl.store import TrajectoryStore
from agentrl.trainer.rl.step_groups import RecordImages

ANSWER = "answer"
"""The choice of words rather than a call of a tool that was shown."""
_RECORDS_AT_ONCE = 200


@dataclass(frozen=True, eq=False)
class Decision:
    """One sampled turn, and its place."""

    turn: TurnTokens
    index: int
    """Of the turn in its record."""
    made: str
    """The first tool that it called, or `ANSWER`."""
    place: int
    is_as_written: bool
    """Its call begins with the tokens that stand for it."""
    tags: tuple[str, ...]
    outcome: str
    """`right` or `wrong` for an answer with a score, else how the record ended."""


class DecisionBook:
    """Decisions, their distinct places, and the beginnings of calls there."""

    def __init__(self, renderer: Renderer) -> None:
        """Hold nothing yet."""
        self.decisions: list[Decision] = []
        self.options: list[dict[str, str]] = []
        """For every place, the tools that could be called, with the ids of their `beginnings`."""
        self.beginnings: list[TurnTokens] = []
        """In the form of turns."""
        self.text = renderer.decode
        self.beginning = cache(self._beginning)
        self._renderer = renderer
        self._close = renderer.sampled_ids(renderer.traits.marks.close)
        self._places: dict[tuple[object, ...], int] = {}

    @property
    def turns(self) -> list[TurnTokens]:
        """Everything to score."""
        return [one.turn for one in self.decisions] + self.beginnings

    def add(
        self,
        record: Record,
        tags: tuple[str, ...],
        turns: Sequence[DispatchedSamplingTask],
        tokens: dict[str, TurnTokens],
    ) -> None:
        """Add the decisions of a record; what a branch copied is in the record that it left."""
        tools: list[tuple[str, ...]] = []
        outcome: str = record.outcome or record.status
        if outcome == "answered" and record.score is not None:
            outcome = "right" if record.score.value > RIGHT_ABOVE else "wrong"
        num_copied = 0 if record.branch is None else record.branch.turn
        for turn in turns:
            own = tuple(dict.fromkeys(str(tool["function"]["name"]) for tool in turn.tools))
            tools.append(own if turn.parent is None or own else tools[turn.parent])
            found = tokens.get(turn.id) if turn.index >= num_copied else None
            start = None if found is None else self._start(found.output_ids)
            if found is None or start is None:
                continue
            called = [call.name for call in turn.tool_calls[:1] if call.name in tools[-1]]
            at = [_within(self.beginning(name), found.output_ids[start:]) for name in called]
            is_as_written = at not in ([], [None])
            length = found.num_prompt_tokens + start + ((at and at[0]) or 0)
            place = self._place(replace(found, full_ids=found.full_ids[:length]), tools[-1])
            made = called[0] if called else ANSWER
            self.decisions.append(
                Decision(found, turn.index, made, place, is_as_written, tags, outcome)
            )

    def _place(self, context: TurnTokens, tools: tuple[str, ...]) -> int:
        """Return the number of a place, with its beginnings if it is new."""
        shown = [one.image.key for one in context.images]  # the ids of all images are equal
        key = (context.full_ids.tobytes(), context.temperature, tools, *shown)
        place = self._places.setdefault(key, len(self._places))
        if place == len(self.options):
            self.options.append({tool: f"{place}?{tool}" for tool in tools})
            for tool, name in self.options[-1].items():
                ids = self.beginning(tool)
                beginning = replace(
                    context,
                    turn_id=name,
                    record_id=name,
                    full_ids=np.concatenate([context.full_ids, ids]),
                    num_prompt_tokens=len(context.full_ids),
                    behavior_logprobs=np.zeros(len(ids), dtype=np.float32),
                    versions=np.zeros(len(ids), dtype=np.int32),
                )
                self.beginnings.append(beginning)
        return place

    def _start(self, ids: np.ndarray) -> int | None:
        """Return where the thinking of a reply [T] has ended; None if it has not."""
        traits = self._renderer.traits
        at = _within(self._close, ids, last=True)
        start = 0 if at is None else at + len(self._close)
        while at is not None and start < len(ids) and not self.text(ids[start : start + 1]).strip():
            start += 1
        is_open = traits.marks.ends_inside(self.text(ids)) or start == len(ids)
        return None if is_open or (traits.starts_inside_thinking and at is None) else start

    def _beginning(self, tool: str) -> np.ndarray:
        """Return the ids that stand for the call of a tool, int32 [B]."""
        ids = self._renderer.call_beginning(tool, after_thinking=True)
        before = self.text(self._renderer.call_beginning(after_thinking=True))
        end = self.text(ids).find(tool, len(before)) + len(tool)
        return ids[: next(n for n in range(1, len(ids) + 1) if len(self.text(ids[:n])) >= end)]


def _within(part: np.ndarray, ids: np.ndarray, *, last: bool = False) -> int | None:
    """Return where a sequence of ids [B], at least one, first (or last) stands in others [T]."""
    starts = np.flatnonzero(ids[: max(0, len(ids) - len(part) + 1)] == part[0]).tolist()
    found = [at for at in starts if np.array_equal(ids[at : at + len(part)], part)]
    return found[-1 if last else 0] if found else None


async def read_decisions(
    store: TrajectoryStore, renderer: Renderer, images: RecordImages, records: Sequence[Record]
) -> DecisionBook:
    """Return the decisions of records; there are none of turns that have expired.

    Raises:
        ConfigError: there are none at all.
        RenderError: calls in the model's format have no beginning.
    """
    book = DecisionBook(renderer)
    for first in range(0, len(records), _RECORDS_AT_ONCE):
        some = records[first : first + _RECORDS_AT_ONCE]
        found = await store.turns.of_records([record.id for record in some])
        tokens = {one.turn_id: one for one in turn_tokens(found, await images.book(found))}
        tasks = await store.tasks.get_many(list({record.task_id for record in some}))
        tags = {task.id: task.tags for task in tasks if isinstance(task, MCPTask)}
        turns: dict[str, list[DispatchedSamplingTask]] = {record.id: [] for record in some}
        for turn in found:
            turns[turn.record_id].append(turn)
        for record in some:
            book.add(record, tags.get(record.task_id, ()), turns[record.id], tokens)
    if not book.decisions:
        raise ConfigError("no stored decision is in these records; give another --where")
    return book
