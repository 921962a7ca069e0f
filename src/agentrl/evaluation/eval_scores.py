"""Figures of an evaluation: means with intervals and pass@k, over all questions and by group.

Pure functions on numbers. A rollout without a score (an infrastructure failure) enters no figure;
such rollouts are counted separately.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agentrl.runtime.printable import counted

PASS_SCORE = 0.5
"""A rollout with a score above this solved its question."""
_Z95 = 1.959963984540054


class ScoreRow(BaseModel):
    """Figures over some questions."""

    model_config = ConfigDict(frozen=True)

    num_tasks: int
    """Questions with at least one scored rollout."""
    num_tries: int
    """Scored rollouts."""
    num_unscored: int
    mean: float
    """Mean over the questions of the mean over each one's rollouts."""
    low: float | None
    high: float | None
    """95 % confidence interval of `mean`, treating questions as a random sample; None for a single
    question with scores outside 0 to 1, which determines no interval."""
    pass_at: dict[int, float]
    """k -> unbiased estimate of the share of questions that k rollouts solve; only those k for
    which every question has at least k scored rollouts."""

    @property
    def interval_text(self) -> str:
        """The interval as text."""
        if self.low is None or self.high is None:
            return "unknown"
        return f"{self.low:.3f} - {self.high:.3f}"


class EvalMetrics(BaseModel):
    """The figures of one evaluation."""

    model_config = ConfigDict(frozen=True)

    version: int
    """Optimizer steps that made the evaluated weights: their version, unless earlier ones were lost."""
    reward_mean: float
    num_tasks: int
    num_unscored: int = 0
    """Records without a score (infrastructure failures); they enter no mean."""
    num_off_version: int = 0
    """Rollouts with a token sampled by another version, because the weights changed meanwhile. 0 if
    nothing is published during an evaluation."""
    total: ScoreRow | None = None
    """Mean with its interval, and pass@k, over all questions."""
    on_version: ScoreRow | None = None
    """The same over the rollouts sampled entirely by the evaluated version; None without any."""
    call_share: float | None = None
    """Share of the scored rollouts that called a tool; evaluations of earlier releases do not say."""
    by_scorer: dict[str, ScoreRow] = Field(default_factory=dict)
    by_tag: dict[str, ScoreRow] = Field(default_factory=dict)
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        """Return the figures for trackers."""
        found: dict[str, Any] = {
            "reward_mean": self.reward_mean,
            "num_unscored": self.num_unscored,
            "num_off_version": self.num_off_version,
        }
        if self.total is not None:
            found |= {"low": self.total.low, "high": self.total.high}
            found["pass_at"] = {str(k): share for k, share in self.total.pass_at.items()}
        return found

    def one_line(self) -> str:
        """Return the figures as a line for logs."""
        text = f"reward {self.reward_mean:.3f} over {counted(self.num_tasks, 'question')}"
        if self.total is not None:
            passes = (f"pass@{k} {share:.3f}" for k, share in self.total.pass_at.items())
            text += f" (95 %: {self.total.interval_text}), {', '.join(passes)}"
        return f"{text}, {self.num_unscored} unscored, {self.num_off_version} off version"


@dataclass(frozen=True)
class TaskScores:
    """Scores of one question's rollouts; None for a rollout without one."""

    scores: Sequence[float | None]
    scorer: str = ""
    tags: Sequence[str] = ()

    @property
    def valid_scores(self) -> list[float]:
        """The scores of the scored rollouts."""
        return [score for score in self.scores if score is not None]


def pass_at_k(num_tries: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of the chance that at least one of k rollouts is right.

    It is the chance that k of the given rollouts, drawn without replacement, are not all wrong
    (Chen et al. 2021, "Evaluating Large Language Models Trained on Code").
    """
    if not 1 <= k <= num_tries:
        raise ValueError(f"pass@{k} needs at least {k} rollouts, got {num_tries}")
    return 1.0 - math.comb(num_tries - num_right, k) / math.comb(num_tries, k)


def score_row(tasks: Iterable[TaskScores]) -> ScoreRow | None:
    """Return the figures over some questions; None if none of them has a score."""
    all_tasks = list(tasks)
    scored = [task.valid_scores for task in all_tasks if task.valid_scores]
    if not scored:
        return None
    means = [sum(scores) / len(scores) for scores in scored]
    mean = sum(means) / len(means)
    bounded = all(0.0 <= score <= 1.0 for scores in scored for score in scores)
    low, high = _interval(means, mean, bounded=bounded)
    return ScoreRow(
        num_tasks=len(scored),
        num_tries=sum(map(len, scored)),
        num_unscored=sum(len(task.scores) - len(task.valid_scores) for task in all_tasks),
        mean=mean,
        low=low,
        high=high,
        pass_at={k: _mean_pass(scored, k) for k in _reported_ks(min(map(len, scored)))},
    )


def rows_by_scorer(tasks: Sequence[TaskScores]) -> dict[str, ScoreRow]:
    """Return a row for each scorer of any of the questions."""
    names = sorted({task.scorer for task in tasks if task.scorer})
    return _rows({name: [task for task in tasks if task.scorer == name] for name in names})


def rows_by_tag(tasks: Sequence[TaskScores]) -> dict[str, ScoreRow]:
    """Return a row for each tag; a question counts in the rows of all its tags."""
    names = sorted({tag for task in tasks for tag in task.tags})
    return _rows({name: [task for task in tasks if name in task.tags] for name in names})


def _rows(groups: Mapping[str, Sequence[TaskScores]]) -> dict[str, ScoreRow]:
    rows = {name: score_row(tasks) for name, tasks in groups.items()}
    return {name: row for name, row in rows.items() if row is not None}


def _reported_ks(num_tries: int) -> list[int]:
    """Return 1, 2, 4, ... and the number of rollouts itself."""
    powers = [2**exponent for exponent in range(num_tries.bit_length())]
    return sorted({*powers, num_tries})


def _mean_pass(scored: Sequence[Sequence[float]], k: int) -> float:
    shares = [
        pass_at_k(len(scores), sum(score > PASS_SCORE for score in scores), k) for scores in scored
    ]
    return sum(shares) / len(shares)


def _interval(
    means: Sequence[float], mean: float, *, bounded: bool
) -> tuple[float | None, float | None]:
    """Return the 95 % interval of a mean over questions.

    Scores between 0 and 1 get Wilson's interval for the number of independent yes-or-no questions
    with the same variance, whose width is positive even if all questions agree. That number is
    estimated from few questions, so it is reduced as in Korn and Graubard (1998), but never below the
    number of questions. Other scores get Student's interval of the mean, which requires at least
    two questions.
    """
    count = len(means)
    variance = sum((value - mean) ** 2 for value in means) / (count - 1) if count > 1 else 0.0
    if not bounded:
        if count == 1:
            return None, None
        half = _t975(count - 1) * math.sqrt(variance / count)
        return mean - half, mean + half
    binomial_variance = mean * (1.0 - mean)
    effective = float(count)
    if variance > 0:
        reduction = (_Z95 / _t975(count - 1)) ** 2
        effective = max(effective, reduction * binomial_variance * count / variance)
    z2 = _Z95**2
    center = (mean + z2 / (2 * effective)) / (1 + z2 / effective)
    half = _Z95 * math.sqrt(binomial_variance / effective + z2 / (4 * effective**2))
    half /= 1 + z2 / effective
    return max(0.0, center - half), min(1.0, center + half)


def _t975(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t.

    Exact for 1 and 2 degrees of freedom. For more, the expansion 26.7.5 of Abramowitz and Stegun has
    an error of less than 0.3 %.
    """
    if degrees <= 2:
        return (12.7062, 4.30265)[degrees - 1]
    z = _Z95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, start=1))
