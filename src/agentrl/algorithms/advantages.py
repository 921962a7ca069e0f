"""Advantages of a group's records from their scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.algorithms.formula_registry import FormulaRegistry
from agentrl.errors import UserCodeError
from agentrl.schema.formulas import OPD

RIGHT_ABOVE = 0.5
"""Scores above this count as right, all others as wrong."""

_MIN_DEVIATION = 1e-9
"""Standard deviations up to this are rounding errors and count as 0."""


@dataclass(frozen=True, eq=False)
class ComparedRewards:
    """The rewards of one group that are compared with each other; at least two."""

    rewards: np.ndarray
    """float64 [n], finite: of n records, or of n runs of one seat; from turn `turn` on, if turns
    have their own rewards."""
    seat: str = ""
    """The seat whose runs are compared; empty if rollouts have one agent."""
    turn: int = 0
    """Number of the turn, counted per run."""


AdvantageFunction = Callable[..., np.ndarray]
ADVANTAGES: FormulaRegistry[AdvantageFunction] = FormulaRegistry(
    "advantage_estimator", "advantage estimator", "agentrl.algorithms.tree_credit"
)
"""Functions of `ComparedRewards` to float64 [n], or of a `TurnTree` (in `algorithms.tree_credit`) to
float64 [N], by the value of `--advantage_estimator`."""


@ADVANTAGES.register("leave_one_out")
def leave_one_out(compared: ComparedRewards) -> np.ndarray:
    """Return each reward minus the mean of the others."""
    rewards = compared.rewards
    centered: np.ndarray = rewards - rewards.mean()
    return centered * (len(rewards) / (len(rewards) - 1))


@ADVANTAGES.register("reinforce_plus_plus")
@ADVANTAGES.register("group_mean")
def group_mean(compared: ComparedRewards) -> np.ndarray:
    """Return each reward minus the mean."""
    advantages: np.ndarray = compared.rewards - compared.rewards.mean()
    return advantages


@ADVANTAGES.register("group_std")
def group_std(compared: ComparedRewards) -> np.ndarray:
    """Return each reward minus the mean, over the standard deviation."""
    deviation = float(compared.rewards.std())
    if deviation <= _MIN_DEVIATION:
        return np.zeros(len(compared.rewards))
    return group_mean(compared) / deviation


@ADVANTAGES.register(OPD)
def on_policy_distillation(compared: ComparedRewards) -> np.ndarray:
    """Return 0 for each reward: the teachers alone decide (`teacher_advantages`)."""
    return np.zeros(len(compared.rewards))


def teacher_advantages(teachers: np.ndarray, behavior: np.ndarray) -> np.ndarray:
    """Return what the teachers say of each sampled token, float64 [T].

    With mu the sampler's policy, `A_t = log teacher_t - log mu_t`: minus a sample of the reverse KL
    divergence (on-policy distillation). Of several teachers, the mean.

    Args:
        teachers: logprobs of K teachers at the sampled tokens, float32 [T, K].
        behavior: log mu, float32 [T].
    """
    advantages: np.ndarray = teachers.astype(np.float64).mean(axis=1) - behavior
    return advantages


def compared_advantages(compared: ComparedRewards, kind: str) -> np.ndarray:
    """Return the advantages of compared rewards, float64 [n].

    Args:
        compared: the rewards.
        kind: the estimator.

    Raises:
        UserCodeError: the user's own failed, or returned something else.
    """
    advantages = ADVANTAGES.formula(kind)(compared)
    where = f"--advantage_estimator {kind}"
    if not isinstance(advantages, np.ndarray):
        raise UserCodeError(
            f"{where}: it must return a NumPy array, not {type(advantages).__name__}"
        )
    if advantages.shape != compared.rewards.shape or advantages.dtype != np.float64:
        raise UserCodeError(
            f"{where}: it must return one float64 a reward, shape {compared.rewards.shape}, not "
            f"{advantages.dtype} {advantages.shape}"
        )
    if not np.isfinite(advantages).all():
        raise UserCodeError(
            f"{where}: it returned a value that is not finite for rewards "
            f"{compared.rewards.tolist()}; return 0 where a deviation is 0"
        )
    return advantages


def group_advantages(
    scores: Sequence[float | None],
    *,
    kind: str = "leave_one_out",
    adv_scaling: float = 1.0,
    sign_clip: bool = True,
    seat: str = "",
    turn: int = 0,
) -> np.ndarray:
    """Return the advantage of each record of one group.

    - `leave_one_out` (RLOO, 2402.14740): score minus the mean of the other scores;
    - `group_mean` (Dr.GRPO, 2503.20783): score minus the mean;
    - `group_std` (GRPO, 2402.03300): the same over the population standard deviation, 0 when all
      scores are equal;
    - `reinforce_plus_plus` (2501.03262, with group baseline): score minus the mean; the whole step
      is then normalized by `step_normalized`.

    With fewer than two scores there is no baseline and the advantage is 0.

    Args:
        scores: one entry per record; None if the infrastructure failed. Those are in no baseline.
        kind: the estimator.
        adv_scaling: factor on the result.
        sign_clip: wrong records (score <= 0.5) get no positive and right ones no negative
            advantage.
        seat: see `ComparedRewards`.
        turn: see `ComparedRewards`.

    Returns:
        float64 [G]; NaN where the score is missing.
    """
    values = np.array([np.nan if score is None else score for score in scores], dtype=np.float64)
    scored = ~np.isnan(values)
    advantages = np.full(len(values), np.nan)
    if scored.sum() > 1:
        compared = ComparedRewards(values[scored], seat, turn)
        advantages[scored] = compared_advantages(compared, kind)
    else:
        advantages[scored] = 0.0
    if sign_clip:
        advantages = clip_signs(advantages, values > RIGHT_ABOVE)
    return advantages * adv_scaling


def returns_to_go(
    scores: Sequence[float | None], step_rewards: Sequence[Sequence[float | None]]
) -> np.ndarray:
    """Return the return-to-go of every record of a group at each turn, float64 [G, T].

    With R_i the score of record i and r_i,k the reward of its turn k (0 where it has none),

        G_i,t = R_i + sum of r_i,k over k >= t,

    so a reward counts for the turn that earned it and for those that led to it, never for later ones.
    T is the longest record's number of turns; past its last turn a record earns R_i.

    Args:
        scores: R, one per record; None gives a row of NaN.
        step_rewards: r, one sequence per record, with one entry per turn.
    """
    num_turns = max((len(rewards) for rewards in step_rewards), default=0)
    earned = np.zeros((len(scores), num_turns))
    for row, rewards in zip(earned, step_rewards, strict=True):
        row[: len(rewards)] = [reward or 0.0 for reward in rewards]
    values = np.array([np.nan if score is None else score for score in scores], dtype=np.float64)
    to_go: np.ndarray = values[:, None] + earned[:, ::-1].cumsum(axis=1)[:, ::-1]
    return to_go


def group_turn_advantages(
    scores: Sequence[float | None],
    step_rewards: Sequence[Sequence[float | None]],
    *,
    kind: str = "leave_one_out",
    seat: str = "",
) -> np.ndarray:
    """Return the advantage of each turn of a group's records, float64 [G, T].

    A_i,t is record i's advantage among all G_j,t of the group, in the estimator of
    `group_advantages`: turn t is compared with what the other records earned from turn t on.
    Equal rewards of all records, such as a bonus for every turn, cancel. Without step rewards,
    every turn has its record's advantage.

    Args:
        scores: see `returns_to_go`.
        step_rewards: see `returns_to_go`.
        kind: the estimator.
        seat: see `ComparedRewards`.
    """
    to_go = returns_to_go(scores, step_rewards)
    columns = [
        group_advantages(
            [None if np.isnan(value) else value for value in column],
            kind=kind,
            sign_clip=False,
            seat=seat,
            turn=turn,
        )
        for turn, column in enumerate(to_go.T.tolist())
    ]
    return np.stack(columns, axis=1) if columns else to_go


def seat_turn_advantages(
    seats: Sequence[str],
    scores: Sequence[float | None],
    step_rewards: Sequence[Sequence[float | None]],
    *,
    kind: str = "leave_one_out",
) -> list[np.ndarray]:
    """Return the advantages of the turns of each stint of a group's seats, float64 [T_i] each.

    A stint is what one agent did in one rollout. It is compared with stints of the same seat alone,
    by `group_turn_advantages`, where t counts the stint's own turns. With one stint per record, all
    of the same seat, these are the advantages of the records.

    Args:
        seats: one per stint.
        scores: R, the final reward of each stint; None for stints that are in no baseline.
        step_rewards: r, one sequence per stint, with one entry per turn.
        kind: the estimator.
    """
    advantages = [np.full(len(rewards), np.nan) for rewards in step_rewards]
    for seat in dict.fromkeys(seats):
        stints = [stint for stint, name in enumerate(seats) if name == seat]
        found = group_turn_advantages(
            [scores[stint] for stint in stints],
            [step_rewards[stint] for stint in stints],
            kind=kind,
            seat=seat,
        )
        for stint, row in zip(stints, found, strict=True):
            advantages[stint][:] = row[: len(step_rewards[stint])]
    return advantages


def turn_advantages(
    advantages: Sequence[float],
    overrides: Sequence[float | None],
    *,
    right: Sequence[bool],
    adv_scaling: float = 1.0,
    sign_clip: bool = True,
) -> np.ndarray:
    """Return the advantages of one record's turns, float64 [T].

    A turn's override (0 for a malformed tool call, say) can only lower its advantage; signs are
    clipped afterwards and the scale comes last.

    Args:
        advantages: of its turns, neither clipped nor scaled.
        overrides: per turn, None if there is none.
        right: per turn, whether the score that it is trained on counts as right.
        adv_scaling: factor on the result.
        sign_clip: as in `group_advantages`.
    """
    combined = np.array(
        [
            advantage if override is None else min(advantage, override)
            for advantage, override in zip(advantages, overrides, strict=True)
        ],
        dtype=np.float64,
    )
    if sign_clip:
        combined = clip_signs(combined, np.array(right, dtype=bool))
    return combined * adv_scaling


def step_normalized(advantages: np.ndarray, num_targets: np.ndarray) -> np.ndarray:
    """Return advantages with mean 0 and standard deviation 1 over the step's target tokens.

    If all advantages are equal, they become 0.

    Args:
        advantages: of every turn of the step [T].
        num_targets: target tokens of every turn [T].
    """
    if len(advantages) == 0:
        return advantages
    mean = np.average(advantages, weights=num_targets)
    deviation = np.sqrt(np.average((advantages - mean) ** 2, weights=num_targets))
    if deviation <= _MIN_DEVIATION:
        return np.zeros(len(advantages))
    normalized: np.ndarray = (advantages - mean) / deviation
    return normalized


def clip_signs(advantages: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return advantages with the wrong sign set to 0 (NaN stays NaN)."""
    clipped: np.ndarray = np.where(right, np.maximum(advantages, 0.0), np.minimum(advantages, 0.0))
    return clipped
