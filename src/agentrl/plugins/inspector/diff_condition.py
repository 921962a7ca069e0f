"""Conditions on a `PolicyDiff`, such as `flips[tool=refund] > 0.01`."""

import operator
import re
from typing import NamedTuple, Self

from agentrl.errors import ConfigError
from agentrl.plugins.inspector.policy_diff import PolicyDiff

_COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_PARTS = ("", "tag", "outcome")
_KEYS = {"flips": (*_PARTS, "tool"), "calls": ("tool",), "kl": _PARTS, "greedy": _PARTS}
_CONDITION = re.compile(
    r"\s*([a-z]+)\s*(?:\[\s*([a-z]+)\s*=\s*([^\]]+?)\s*\]\s*)?"
    r"(<=|>=|<|>)\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*"
)


class DiffCondition(NamedTuple):
    """A figure of a diff, and a number to compare it with."""

    measure: str
    key: str
    """`tool`, `tag`, `outcome`, or empty: all decisions."""
    value: str
    comparison: str
    number: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a condition.

        Raises:
            ConfigError: it is none.
        """
        found = _CONDITION.fullmatch(text)
        measure, key, value, comparison, number = found.groups("") if found else ("",) * 5
        if key not in _KEYS.get(measure, ()):
            raise ConfigError(
                f"--fail_if {text}: give flips, flips[tool=NAME], calls[tool=NAME], kl or greedy (all "
                "but calls also with [tag=NAME] or [outcome=NAME]), then <, <=, > or >= and a "
                "number: flips[tool=refund] > 0.01"
            )
        return cls(measure, key, value, comparison, float(number))

    def __str__(self) -> str:
        return f"{self.measure}[{self.key}={self.value}]" if self.key else self.measure

    def figure(self, diff: PolicyDiff) -> float:
        """Return the figure of a diff.

        Raises:
            ConfigError: no decision has the tag or the outcome, or no model was shown the tool.
        """
        changes = dict(diff.whole.changes)
        parts = {"tag": diff.tags, "outcome": diff.outcomes}.get(self.key, (diff.whole,))
        known = {part.name: part for part in parts}
        name = self.value or diff.whole.name
        names = changes if self.key == "tool" else known
        if name not in names:
            raise ConfigError(f"--fail_if {self}: known are {', '.join(sorted(names))}")
        if self.measure == "calls":
            return changes[name]
        if self.key == "tool":
            flipped = [one for one in diff.flips if name in (one.before, one.after)]
            return sum(one.num_decisions for one in flipped) / diff.whole.num_decisions
        return float(getattr(known[name], self.measure))

    def holds(self, figure: float) -> bool:
        """Return whether the comparison of a figure is true."""
        return bool(_COMPARISONS[self.comparison](figure, self.number))
