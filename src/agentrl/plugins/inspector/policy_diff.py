"""`PolicyDiff`: what two models would decide differently in the places that a run stored.

A model's choice at a place is the call or the answer that it gives the highest probability: that of
the tokens that stand for the call of a tool, and for `answer` what they leave over. A decision *flips*
if the models choose differently at its place. The mean probability of a tool over decisions is the
expected number of its calls per decision, in the contexts that the run met.

Shape legend: D decisions, P places, K choices (the tools in the order of their names, then `answer`).
"""

# ruff: noqa: N803, N806 - shape suffixes

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agentrl.algorithms.losses import kl_penalty
from agentrl.plugins.inspector.stored_decisions import ANSWER, DecisionBook
from agentrl.trainer.turn_scores import ScoredTurns

_TOKENS_BEFORE_WISH = 8


@dataclass(frozen=True)
class PartChange:
    """A part of the decisions: all, or those of a tag, of an outcome, or that made a choice."""

    name: str
    num_decisions: int
    flips: float
    """Share of the decisions that flip."""
    kl: float
    """Mean estimate of the KL divergence per sampled token, in nats: k2 of Schulman
    (joschu.net/blog/kl-approx.html), the same both ways, which no rare token decides."""
    greedy: float
    """Share of the sampled tokens in whose places the likeliest tokens differ."""
    reply_from: float
    """Mean probability of the whole replies under the first model."""
    reply_to: float
    calls_from: dict[str, float]
    """Expected calls per decision under the first model, by choice."""
    calls_to: dict[str, float]

    @property
    def changes(self) -> list[tuple[str, float]]:
        """The choices with the changes of their expected calls, the largest first."""
        changes = [(name, self.calls_to[name] - calls) for name, calls in self.calls_from.items()]
        return sorted(changes, key=lambda one: -abs(one[1]))


@dataclass(frozen=True)
class FlipGroup:
    """Decisions that flip from one choice to another, of one kind of question and one outcome."""

    before: str
    after: str
    tag: str
    outcome: str
    num_decisions: int
    record_id: str
    """Record of the flip with the largest change, for `agentrl inspect record`."""
    turn: int
    probability_from: float
    """Of the second model's choice there, under the first model."""
    probability_to: float
    wish: str
    """The stored reply up to where the second model's likeliest token first differs, and that token."""


@dataclass(frozen=True)
class PolicyDiff:
    """The difference between two models. Lists begin with the largest change."""

    run: str
    start: str
    end: str
    """Both models, as they were named."""
    where: str
    """Condition on the records; empty: none."""
    num_records: int
    num_places: int
    """Distinct places of the decisions."""
    tokens_computed: int
    """Tokens of a model's forward passes, those that stand for calls included."""
    tokens_separate: int
    """Tokens if every turn had a pass of its own."""
    effective_from: float
    """Effective share of the decisions as samples of the first model: (sum w)^2 / (D sum w^2), with w the
    ratio of a reply's probability to that at its sampling, cut at sqrt(D) (Ionides 2008)."""
    effective_to: float
    as_written: float
    """Share of the stored calls that begin with the tokens that stand for them."""
    whole: PartChange
    flips: tuple[FlipGroup, ...]
    choices: tuple[PartChange, ...]
    """By stored choice; those never made are missing."""
    tags: tuple[PartChange, ...]
    """A question with several tags counts for each."""
    outcomes: tuple[PartChange, ...]


def policy_diff(
    names: dict[str, str], book: DecisionBook, scored: Sequence[ScoredTurns]
) -> PolicyDiff:
    """Return the difference of two models: `names` has `run`, `start`, `end` and `where`."""
    compared, decisions = _Compared(book, scored), book.decisions
    called = [one.is_as_written for one in decisions if one.made != ANSWER]
    return PolicyDiff(
        **names,
        num_records=len({one.turn.record_id for one in decisions}),
        num_places=len(book.options),
        tokens_computed=scored[0].num_tokens,
        tokens_separate=sum(len(one.turn.path) for one in decisions),
        effective_from=compared.effective(0),
        effective_to=compared.effective(1),
        as_written=sum(called) / len(called) if called else 1.0,
        whole=compared.parts([("all",) for _ in decisions])[0],
        flips=compared.flips(),
        choices=compared.parts([(one.made,) for one in decisions]),
        tags=compared.parts([one.tags for one in decisions]),
        outcomes=compared.parts([(one.outcome,) for one in decisions]),
    )


class _Compared:
    """Decisions, and what both models make of them."""

    def __init__(self, book: DecisionBook, scored: Sequence[ScoredTurns]) -> None:
        self._decisions, self._text = book.decisions, book.text
        self._choices = [*sorted({tool for shown in book.options for tool in shown}), ANSWER]
        places = [one.place for one in book.decisions]
        self._p_DK = [_choice_probabilities(book, self._choices, one)[places] for one in scored]
        self._chosen_D = [p_DK.argmax(axis=1) for p_DK in self._p_DK]
        scores = [[one.by_turn[own.turn.turn_id] for own in book.decisions] for one in scored]
        pairs = list(zip(*scores, strict=True))
        self._replies_D = [np.array([one.logprobs.sum() for one in side]) for side in scores]
        self._likeliest = [after.likeliest for _, after in pairs]
        logprobs = [[torch.from_numpy(one.logprobs) for one in pair] for pair in pairs]
        self._kl_D = np.array([kl_penalty(*pair, kind="k2").sum().item() for pair in logprobs])
        self._greedy_D = np.array([(a.likeliest != b.likeliest).sum() for a, b in pairs])

    def effective(self, side: int) -> float:
        """Return `PolicyDiff.effective_from` of a model."""
        sampled = [float(one.turn.behavior_logprobs.sum()) for one in self._decisions]
        weights = np.exp(np.minimum(self._replies_D[side] - sampled, 0.5 * math.log(len(sampled))))
        return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))

    def flips(self) -> tuple[FlipGroup, ...]:
        """Return the decisions that flip."""
        before, after = self._chosen_D
        groups: defaultdict[tuple[str, str, str, str], list[int]] = defaultdict(list)
        for number in np.flatnonzero(before != after).tolist():
            one = self._decisions[number]
            choices = (self._choices[before[number]], self._choices[after[number]])
            groups[*choices, ", ".join(one.tags), one.outcome].append(number)
        found = []
        for key, numbers in groups.items():
            p_from, p_to = (p_DK[numbers, after[numbers]] for p_DK in self._p_DK)
            at = int((p_to - p_from).argmax())
            example = self._decisions[numbers[at]]
            where = (len(numbers), example.turn.record_id, example.index)
            chances = (float(p_from[at]), float(p_to[at]))
            found.append(FlipGroup(*key, *where, *chances, self._wish(numbers[at])))
        return tuple(sorted(found, key=lambda group: -group.num_decisions))

    def _wish(self, number: int) -> str:
        stored, likeliest = self._decisions[number].turn.output_ids, self._likeliest[number]
        differs = stored != likeliest
        first = int(differs.argmax()) if differs.any() else len(stored) - 1
        shown = stored[max(0, first - _TOKENS_BEFORE_WISH) : first].tolist()
        return self._text([*shown, int(likeliest[first])])

    def parts(self, names_D: Sequence[Sequence[str]]) -> tuple[PartChange, ...]:
        """Return the figures by name, of which a decision has none, one or several."""
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        for number, names in enumerate(names_D):
            for name in names:
                numbers[name].append(number)
        found = [self._part(*entry) for entry in sorted(numbers.items())]
        return tuple(sorted(found, key=lambda part: (-part.flips, -part.kl)))

    def _part(self, name: str, numbers: list[int]) -> PartChange:
        before, after = (
            dict(zip(self._choices, p_DK[numbers].mean(axis=0).tolist(), strict=True))
            for p_DK in self._p_DK
        )
        num_tokens = sum(self._decisions[number].turn.num_targets for number in numbers)
        flips = float((self._chosen_D[0] != self._chosen_D[1])[numbers].mean())
        kl, greedy = (
            float(one[numbers].sum()) / num_tokens for one in (self._kl_D, self._greedy_D)
        )
        start, end = (float(np.exp(side[numbers]).mean()) for side in self._replies_D)
        return PartChange(name, len(numbers), flips, kl, greedy, start, end, before, after)


def _choice_probabilities(
    book: DecisionBook, choices: Sequence[str], scored: ScoredTurns
) -> np.ndarray:
    """Return the probabilities of all choices [P, K]."""
    p_PK = np.zeros((len(book.options), len(choices)))
    column = {tool: number for number, tool in enumerate(choices)}
    for place, options in enumerate(book.options):
        for tool, turn_id in options.items():
            p_PK[place, column[tool]] = math.exp(scored.by_turn[turn_id].logprobs.sum())
    # A name that begins another, as `add` may begin `add_item`, has what the other leaves.
    ids = {tool: book.beginning(tool).tolist() for tool in choices[:-1]}
    for tool in sorted(ids, key=lambda name: -len(ids[name])):
        longer = [one for one in ids if one != tool and ids[one][: len(ids[tool])] == ids[tool]]
        p_PK[:, column[tool]] -= p_PK[:, [column[one] for one in longer]].sum(axis=1)
    p_PK = p_PK.clip(min=0.0)
    p_PK[:, -1] = (1.0 - p_PK.sum(axis=1)).clip(min=0.0)
    return p_PK
