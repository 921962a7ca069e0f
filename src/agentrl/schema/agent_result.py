"""`AgentResult`: the answer of an agent, with optional reward and metrics."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, SupportsFloat

_KINDS: dict[str, type[Any]] = {
    "answer": str,
    "error": str,
    "step_rewards": Iterable,
    "metrics": Mapping,
    "seats": Iterable,
}
MAX_ANSWER_CHARS = 1_000_000
MAX_STEP_REWARDS = 10_000
MAX_METRICS, MAX_METRIC_CHARS = 1_000, 200
MAX_SEATS, MAX_SEAT_CHARS = 1_000, 100
"""Limits of one result: it is stored as one document, and read by an event loop."""


@dataclass(frozen=True)
class SeatResult:
    """What a seat earned: an agent of a rollout of several, or one stint of it."""

    name: str
    """As in the header `X-AgentRL-Seat` of its calls."""
    reward: float | None = None
    """Final reward, on which its turns are trained in place of the rollout's; None: the rollout's."""
    stint: str = ""
    """As in the header `X-Session-ID` of its calls, by which stints of the same seat differ."""
    trained: bool = True
    """False: its turns are not trained on."""


@dataclass(frozen=True)
class AgentResult:
    """How a rollout of an agent or environment ended.

    An agent that leaves its reward to the task's scorer returns the answer alone: text, or None.

    Example:
        ```python
        async def play(task, endpoint):
            game = Game(task.query)
            ...
            return AgentResult(game.last_move, reward=game.score, metrics={"moves": game.num_moves})
        ```
    """

    answer: str | None
    """The final answer, if there is one."""
    reward: float | None = None
    """Final reward of the rollout; it replaces the scorer's score of the Record."""
    step_rewards: Iterable[float | None] = ()
    """Rewards of the trained model's calls, in order, in addition to `reward`. None and missing
    entries mean no step reward."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further figures by name, such as the parts of the reward; kept with the Record."""
    seats: Iterable[SeatResult] = ()
    """What each seat earned, if the rollout has several agents; either all seats that made calls are
    listed, or none, and then all are trained on the rollout's reward."""
    truncated: bool = False
    """The environment cut the episode short; the outcome is `turns_limit`."""
    error: str | None = None
    """Why the attempt is not the model's fault: it ends without a score and is retried."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "AgentResult":
        """Return the result that another process sent as JSON.

        Raises:
            TypeError: the fields are not those of a result.
        """
        result = cls(**fields)
        seats: Iterable[Any] = result.seats
        return replace(result, seats=tuple(SeatResult(**seat) for seat in seats))

    @classmethod
    def of(cls, returned: object) -> "AgentResult":
        """Return what an agent returned as a result with plain numbers.

        Raises:
            ValueError: it is not text, None or a result, or contains non-finite numbers.
        """
        if returned is None or isinstance(returned, str):
            _check_size(returned, ())
            return cls(returned)
        if not isinstance(returned, cls):
            raise ValueError(
                f"the agent returned {type(returned).__name__}; it must return the answer as text, "
                "None, or an agentrl.AgentResult"
            )
        result = returned
        for name, kind in _KINDS.items():
            value = getattr(result, name)
            if not isinstance(value, kind) and not (value is None and kind is str):
                raise ValueError(
                    f"the agent's {name} is a {type(value).__name__}, not a {kind.__name__}"
                )
        _check_size(result.answer, result.metrics)
        steps = tuple(islice(result.step_rewards, MAX_STEP_REWARDS + 1))
        if len(steps) > MAX_STEP_REWARDS:
            raise ValueError(f"the agent returned more than {MAX_STEP_REWARDS:,} step_rewards")
        seats = tuple(islice(result.seats, MAX_SEATS + 1))
        if len(seats) > MAX_SEATS:
            raise ValueError(f"the agent returned more than {MAX_SEATS:,} seats")
        return replace(
            result,
            reward=_number("reward", result.reward),
            step_rewards=tuple(
                _number(f"step_rewards[{index}]", step) for index, step in enumerate(steps)
            ),
            metrics={
                str(name): _finite(f"metrics[{name!r}]", value)
                for name, value in result.metrics.items()
            },
            seats=tuple(map(_seat, seats)),
            truncated=bool(result.truncated),
        )


def _check_size(answer: str | None, metrics: Collection[object]) -> None:
    if answer is not None and len(answer) > MAX_ANSWER_CHARS:
        raise ValueError(
            f"the agent's answer has {len(answer):,} characters; the limit is {MAX_ANSWER_CHARS:,}"
        )
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"the agent returned more than {MAX_METRICS:,} metrics")
    longest = max((len(str(name)) for name in metrics), default=0)
    if longest > MAX_METRIC_CHARS:
        raise ValueError(
            f"the name of a metric has {longest} characters; the limit is {MAX_METRIC_CHARS}"
        )


def _seat(seat: object) -> SeatResult:
    if not isinstance(seat, SeatResult):
        raise ValueError(f"the agent's seats contain a {type(seat).__name__}, not a SeatResult")
    if {type(seat.name), type(seat.stint)} != {str}:
        raise ValueError("the name and the stint of a seat must be text")
    reward = _number(f"reward of seat {seat.name[:MAX_METRIC_CHARS]!r}", seat.reward)
    return replace(seat, reward=reward, trained=bool(seat.trained))


def _number(name: str, value: object) -> float | None:
    return None if value is None else _finite(name, value)


def _finite(name: str, value: object) -> float:
    """Return a finite number; scalars of NumPy and torch are accepted."""
    number = float(value) if isinstance(value, SupportsFloat) else math.nan
    if not math.isfinite(number):
        description = number if isinstance(value, SupportsFloat) else f"a {type(value).__name__}"
        raise ValueError(f"the agent's {name} is {description}, not a finite number")
    return number
