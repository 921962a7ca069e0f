"""Recipes: the objectives of papers as values of flags (`--recipe NAME`).

Input: a recipe's name. Output: the flags that make loss, gradient and advantages those of the
paper. `tests/unit/algorithms/test_recipes.py` compares them with the objectives as printed in the
papers.

AgentRL's own defaults are off in all of them: sign clipping, the hard drop range, and the exclusion
of turns without advantage, which the papers' normalizers count. A paper's expectation over
questions is the mean over the whole step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from agentrl.errors import ConfigError

_DEFAULTS_OFF: dict[str, Any] = {
    "sign_clip": False,
    "drop_zero_advantage": False,
    "importance_weight_cap_ratio": 0.0,
}
_RECORD_MEAN = {"token_level_loss": False, "skip_length_normalization": False}
_RECORD_SUM = {"token_level_loss": False, "skip_length_normalization": True}
_TOKEN_MEAN = {"token_level_loss": True}
_ALL_GROUPS = {"min_score_spread": 0.0}
"""Keeps groups of equal scores: they have no gradient, but count in the mean."""


@dataclass(frozen=True)
class Recipe:
    """The flags of one paper's objective."""

    source: str
    """Paper and equation."""
    flags: Mapping[str, Any]


def _recipe(source: str, *parts: Mapping[str, Any], **flags: Any) -> Recipe:
    values = dict(_DEFAULTS_OFF)
    for part in (*parts, flags):
        values |= part
    return Recipe(source, values)


RECIPES = {
    "grpo": _recipe(
        "GRPO (arXiv 2402.03300, eq. 3, with the estimator of eq. 4 and the paper's beta)",
        *(_RECORD_MEAN, _ALL_GROUPS),
        loss_calculator="GRPO",
        epsilon=0.2,
        epsilon_higher=0.0,
        advantage_estimator="group_std",
        kl_coefficient=0.04,
        kl_estimator="k3",
    ),
    "dapo": _recipe(
        "DAPO (arXiv 2503.14476, eq. 8 to 11): clip-higher, token mean, dynamic sampling",
        _TOKEN_MEAN,
        loss_calculator="GRPO",
        epsilon=0.2,
        epsilon_higher=0.08,
        advantage_estimator="group_std",
    ),
    "dr_grpo": _recipe(
        "Dr. GRPO (arXiv 2503.20783, section 3.2); `--loss_normalizer_length L` divides by a constant",
        *(_RECORD_SUM, _ALL_GROUPS),
        loss_calculator="GRPO",
        epsilon=0.2,
        epsilon_higher=0.0,
        advantage_estimator="group_mean",
    ),
    "gspo": _recipe(
        "GSPO (arXiv 2507.18071, eq. 5 to 7, clip range of section 5.1); a sequence is one turn",
        *(_RECORD_MEAN, _ALL_GROUPS),
        loss_calculator="GSPO",
        epsilon=3e-4,
        epsilon_higher=1e-4,
        advantage_estimator="group_std",
    ),
    "cispo": _recipe(
        "CISPO (arXiv 2506.13585, eq. 4 and 5), with ScaleRL's upper bound 5 (arXiv 2510.13786)",
        *(_TOKEN_MEAN, _ALL_GROUPS),
        loss_calculator="CISPO",
        epsilon=0.0,
        epsilon_higher=4.0,
        advantage_estimator="group_std",
    ),
    "minirl": _recipe(
        "MiniRL (arXiv 2512.01374): truncated weight, hard clip range, no length normalization",
        *(_RECORD_SUM, _ALL_GROUPS),
        loss_calculator="MINIRL",
        epsilon=0.2,
        epsilon_higher=0.07,
        importance_weight_truncation=5.0,
        importance_weight_cap_ratio=1.0,
        advantage_estimator="group_mean",
    ),
    "rloo": _recipe(
        "RLOO (arXiv 2402.14740, section 3.3): REINFORCE on whole answers, leave-one-out baseline",
        *(_RECORD_SUM, _ALL_GROUPS),
        loss_calculator="REINFORCE",
        advantage_estimator="leave_one_out",
    ),
    "reinforce_pp": _recipe(
        "REINFORCE++ with baseline (arXiv 2501.03262): group mean, normalized over the batch",
        *(_TOKEN_MEAN, _ALL_GROUPS),
        loss_calculator="GRPO",
        epsilon=0.2,
        epsilon_higher=0.0,
        advantage_estimator="reinforce_plus_plus",
    ),
}
"""By the value of `--recipe`."""


def expand_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags with the recipe among them replaced by its flags.

    Flags that are also given take precedence: `--recipe dapo --epsilon_higher 0.1` is DAPO with
    another bound.
    """
    others = dict(values)
    name = others.pop("recipe", None)
    if name is None or str(name).lower() == "none":
        return others
    key = str(name).lower().replace("-", "_")
    if key not in RECIPES:
        similar = get_close_matches(key, RECIPES, n=1)
        hint = f"; did you mean {similar[0]}?" if similar else ""
        raise ConfigError(f"--recipe {name} is not known{hint} (known: {', '.join(RECIPES)})")
    return {**RECIPES[key].flags, **others}


def recipe_row(name: str) -> str:
    """Return a recipe as a row of the table in the documentation."""
    recipe = RECIPES[name]
    flags = ", ".join(f"{flag}: {_flag_value(value)}" for flag, value in recipe.flags.items())
    return f"| `{name}` | {recipe.source} | `{flags}` |"


def _flag_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
