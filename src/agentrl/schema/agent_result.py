"""`AgentResult`: what an agent may hand over beside its answer."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat

_KINDS: dict[str, type[Any]] = {
    "answer": str,
    "error": str,
    "step_rewards": Iterable,
    "metrics": Mapping,
}


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
    """What the rollout earned at its end; the score of the Record, in place of the scorer's."""
    step_rewards: Iterable[float | None] = ()
    """What each call of the trained model earned, in the order of the calls; it comes on top of
    `reward`. None, and calls past the last entry, earned nothing of their own."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further figures by name, such as the parts of the reward; kept with the Record."""
    truncated: bool = False
    """The environment cut the episode short; the outcome is `turns_limit`."""
    error: str | None = None
    """Why the attempt says nothing of the model: it ends without a score and is tried again."""

    @classmethod
    def of(cls, returned: object) -> "AgentResult":
        """Return what an agent returned as a result with plain numbers.

        Raises:
            ValueError: it is neither text, None nor a result, or holds no finite numbers.
        """
        if returned is None or isinstance(returned, str):
            return cls(returned)
        if not isinstance(returned, cls):
            raise ValueError(
                f"the agent returned {type(returned).__name__}; it has to return the answer as "
                "text, None, or an agentrl.AgentResult"
            )
        result = returned
        for name, kind in _KINDS.items():
            value = getattr(result, name)
            if not isinstance(value, kind) and not (value is None and kind is str):
                raise ValueError(
                    f"the agent's {name} is a {type(value).__name__}, not a {kind.__name__}"
                )
        return replace(
            result,
            reward=_number("reward", result.reward),
            step_rewards=tuple(
                _number(f"step_rewards[{index}]", step)
                for index, step in enumerate(result.step_rewards)
            ),
            metrics={
                str(name): _finite(f"metrics[{name!r}]", value)
                for name, value in result.metrics.items()
            },
            truncated=bool(result.truncated),
        )


def _number(name: str, value: object) -> float | None:
    return None if value is None else _finite(name, value)


def _finite(name: str, value: object) -> float:
    """Return a finite number; scalars of NumPy and torch are numbers, too."""
    number = float(value) if isinstance(value, SupportsFloat) else math.nan
    if not math.isfinite(number):
        shown = number if isinstance(value, SupportsFloat) else f"a {type(value).__name__}"
        raise ValueError(f"the agent's {name} is {shown}, not a finite number")
    return number
