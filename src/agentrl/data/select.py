"""Selects the turns of a finished group that are trained on.

Scores, tokens, logprobs and versions are facts that samplers stored; advantages and drops are
derived here. Every record and turn that is left out gets a reason, for the ledger and the metrics.
A pure function of its inputs, which are arrays: independent of the store.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from agentrl.algorithms.advantages import (
    ADVANTAGES,
    RIGHT_ABOVE,
    seat_turn_advantages,
    step_normalized,
    teacher_advantages,
    turn_advantages,
)
from agentrl.algorithms.filters import (
    GroupFacts,
    RecordDrop,
    RecordFacts,
    efficiency_shaped,
    filter_group,
)
from agentrl.algorithms.tree_credit import reads_tree
from agentrl.config.sections import AlgorithmSection
from agentrl.data.record_tree import (
    RecordTree,
    chain_weights,
    record_tree,
    seat_tree_credits,
    worths_of_branches,
)
from agentrl.data.seat_stints import NO_SEAT, SeatStint, seat_stints, step_rewards
from agentrl.data.shown_images import ImageBook
from agentrl.data.tokens import TurnTokens, turn_tokens, with_routed_experts
from agentrl.schema import DBRecordData, DispatchedSamplingTask, TurnWorth
from agentrl.schema.training import EQUAL_SCORES
from agentrl.schema.turn import NO_VERSION

TurnDrop = Literal[
    "record",
    "inherited",
    "untrained_seat",
    "no_logprobs",
    "no_version",
    "penalties",
    "no_teacher",
    "temperature",
    "placeholder",
    "positions",
    "stale",
    "zero_advantage",
    "minimal_advantage",
    "non_positive_advantage",
]
"""Why a turn is left out; `record` if its whole record is left out.

`inherited`: a branch copied it from the record that sampled it and that it is trained with.
`untrained_seat`: the environment made the turn's agent part of the world, such as a simulated user,
or its run was abandoned. `no_version`: the policy that sampled some of its tokens is unknown, and
with it the turn's age and ratios. `penalties`: its logprobs include penalties on repeated tokens,
unlike the policy's. `no_teacher`: a teacher has not given its logprobs.
`temperature`: the teachers are part of the advantage, but the turn was not sampled at temperature 1,
which theirs are for. `placeholder`: the policy sampled the token that stands for an image.
`positions`: the server computed different positions for its images than their processor does.
"""


@dataclass(frozen=True)
class LeftOutTurn:
    """A turn that is not trained on, and why."""

    turn_id: str
    record_id: str
    reason: str
    """A `TurnDrop`; if the whole record is left out, the record's reason."""
    num_targets: int
    staleness: int


@dataclass(frozen=True, eq=False)
class SelectedGroup:
    """One group after selection: the turns to train on, and what was left out."""

    task_id: str
    record_ids: tuple[str, ...]
    scores: tuple[float | None, ...]
    """As stored, one per record; None if scoring or the infrastructure failed."""
    turns: tuple[TurnTokens, ...]
    """With their advantages, in record order."""
    dropped_records: dict[str, str] = field(default_factory=dict)
    """Record id -> reason, for every record without a turn in `turns`."""
    left_out: tuple[LeftOutTurn, ...] = ()
    """Turns that are not in `turns`, in record order."""
    weights: tuple[float, ...] = ()
    """Probability of each record in its tree under chains; 1 for every chain."""
    has_branches: bool = False
    """Whether some of its records left others."""
    has_equal_chains: bool = False
    """Whether its rollouts from the question, without the branches, are of equal scores."""
    worths: Mapping[str, TurnWorth] = field(default_factory=dict)
    """Worth by turn id, if some of its records left others."""

    @property
    def num_inherited_tokens(self) -> int:
        """Sampled tokens that branches copied."""
        return sum(turn.num_targets for turn in self.left_out if turn.reason == "inherited")

    @property
    def usable(self) -> bool:
        """Whether anything is left to train on."""
        return bool(self.turns)


def select_group(
    records: Sequence[DBRecordData],
    algorithm: AlgorithmSection,
    *,
    policy_version: int,
    seed: int = 0,
    images: ImageBook | None = None,
) -> SelectedGroup:
    """Decide what to train on in a completed group.

    Args:
        records: all records of one Task, with their turns.
        algorithm: filters, advantages and freshness.
        policy_version: version of the weights that the step starts from.
        seed: draws the records that `balance_sample` and `reserve_context_error_count` keep.
        images: images of the records; a turn with any other image is left out.

    Raises:
        ValueError: the records are not of one Task, or turns are missing.
    """
    if len({record.task_id for record in records}) != 1:
        raise ValueError("select_group expects the records of exactly one task")
    ordered = sorted(records, key=lambda record: record.traj_id)
    stints = [seat_stints(record) for record in ordered]
    facts = tuple(_facts(record, own) for record, own in zip(ordered, stints, strict=True))
    group = GroupFacts(ordered[0].task_id, facts)
    reasons: tuple[RecordDrop | None, ...] = filter_group(
        group,
        # Teachers tell rollouts of equal scores apart.
        min_score_spread=0.0 if algorithm.teacher_share else algorithm.min_score_spread,
        own_filter=algorithm.group_filter,
        balance_sample=algorithm.balance_sample,
        min_turns=algorithm.min_turns,
        reserve_context_error_count=algorithm.reserve_context_error_count,
        seed=seed,
    )
    scores = efficiency_shaped(group) if algorithm.efficient_rewarding else group.scores
    tree = record_tree(ordered)
    credits = _group_credits(tree, ordered, stints, scores, algorithm)
    kept: list[TurnTokens] = []
    dropped_records: dict[str, str] = {}
    left_out: list[LeftOutTurn] = []
    for record, reason, by_turn in zip(ordered, reasons, credits, strict=True):
        if reason is None:
            verdicts = _turn_verdicts(record, by_turn, algorithm, policy_version, images)
        else:
            verdicts = _verdicts_of_dropped(record, by_turn, images)
        drop_counts: Counter[str] = Counter()
        for verdict, turn in verdicts:
            if verdict is None:
                kept.append(turn)
            else:
                drop_counts[verdict] += 1
                named = reason if reason is not None and verdict == "record" else verdict
                left_out.append(_left_out(turn, named, policy_version))
        num_dropped = sum(drop_counts.values())
        del drop_counts["inherited"]
        if record.expired_at is not None:
            dropped_records[record.record_id] = "expired"
        elif reason is not None:
            dropped_records[record.record_id] = reason
        elif num_dropped == len(verdicts):
            # All turns were dropped. The record's reason is the most frequent one.
            dropped_records[record.record_id] = (
                drop_counts.most_common(1)[0][0] if drop_counts else "no_targets"
            )
    if not kept and _are_equal(credits):
        # All rewards are equal. (Different rewards whose advantages were all overridden would give
        # zeros as well.)
        dropped_records = {
            record_id: EQUAL_SCORES if reason == "zero_advantage" else reason
            for record_id, reason in dropped_records.items()
        }
    final_scores = tuple(_score(record) for record in ordered)
    return SelectedGroup(
        task_id=group.task_id,
        record_ids=tuple(record.record_id for record in ordered),
        scores=final_scores,
        turns=tuple(kept),
        dropped_records=dropped_records,
        left_out=tuple(left_out),
        weights=tuple(chain_weights(tree, final_scores)),
        has_branches=any(record.branch is not None for record in ordered),
        has_equal_chains=_has_equal_chains(ordered, algorithm.min_score_spread),
        worths=worths_of_branches(ordered, tree, final_scores),
    )


def _has_equal_chains(records: Sequence[DBRecordData], min_score_spread: float) -> bool:
    chains = [record for record in records if record.branch is None and record.round == 0]
    scores = [score for score in map(_score, chains) if score is not None]
    return not scores or max(scores) - min(scores) < min_score_spread


def _left_out(turn: TurnTokens, reason: str, policy_version: int) -> LeftOutTurn:
    return LeftOutTurn(
        turn_id=turn.turn_id,
        record_id=turn.record_id,
        reason=reason,
        num_targets=turn.num_targets,
        staleness=turn_staleness(turn, policy_version),
    )


def turn_staleness(turn: TurnTokens, policy_version: int) -> int:
    """Return the current policy version minus the oldest version in the turn."""
    return policy_version - int(turn.versions.min())


def _facts(record: DBRecordData, own_stints: Sequence[SeatStint]) -> RecordFacts:
    # A record without tokens of the policy carries no information about it and must not shift the
    # others' baseline.
    stints = [stint for stint in own_stints if stint.is_trained and _has_targets(stint)]
    has_targets = bool(stints)
    seat_scores: dict[str, list[float]] = {}
    for stint in stints:
        if stint.seat != NO_SEAT and stint.reward is not None:
            seat_scores.setdefault(stint.seat, []).append(stint.reward)
    return RecordFacts(
        record_id=record.record_id,
        score=_score(record) if has_targets else None,
        num_turns=len(record.turns),
        outcome=record.outcome,
        has_targets=has_targets,
        has_step_scores=record.score is not None
        and any(step is not None for step in step_rewards(record)),
        seat_scores=seat_scores,
    )


def _has_targets(stint: SeatStint) -> bool:
    return any(turn.trainable and len(turn.output_ids) for turn in stint.turns)


@dataclass(frozen=True)
class _Credit:
    """What a turn is trained on."""

    advantage: float
    """Neither clipped nor scaled."""
    is_right: bool
    """Whether the final reward behind it counts as right."""
    is_trained: bool
    is_inherited: bool
    is_of_turn: bool
    """The credit is that of the turn rather than of its record."""


def _group_credits(
    tree: RecordTree,
    records: Sequence[DBRecordData],
    stints_by_record: Sequence[Sequence[SeatStint]],
    scores: Sequence[float | None],
    algorithm: AlgorithmSection,
) -> list[dict[int, _Credit]]:
    """Return the credit of every turn of a group's records, by its index.

    Args:
        tree: of the group.
        records: those of the group.
        stints_by_record: their `seat_stints`.
        scores: their scores, as `efficiency_shaped` may have shifted them.
        algorithm: the estimator.
    """
    stints = [
        (position, stint, _final_reward(stint, record, score))
        for position, (record, own_stints, score) in enumerate(
            zip(records, stints_by_record, scores, strict=True)
        )
        for stint in own_stints
    ]
    trained = [(position, stint, final) for position, stint, final in stints if stint.is_trained]
    kind = algorithm.advantage_estimator
    # Without branches, `leave_one_out` and its like are those of the records.
    is_of_turn = any(tree.num_inherited) or reads_tree(ADVANTAGES.formula(kind))
    advantages = (
        seat_tree_credits(tree, trained, kind)
        if is_of_turn
        else seat_turn_advantages(
            [stint.seat for _, stint, _ in trained],
            [final for _, _, final in trained],
            [stint.step_rewards for _, stint, _ in trained],
            kind=kind,
        )
    )
    credits: list[dict[int, _Credit]] = [
        {
            turn.index: _Credit(
                0.0,
                is_right=False,
                is_trained=False,
                is_inherited=turn.index < num_inherited,
                is_of_turn=is_of_turn,
            )
            for turn in record.turns
        }
        for record, num_inherited in zip(records, tree.num_inherited, strict=True)
    ]
    for (position, stint, _), values in zip(trained, advantages, strict=True):
        is_right = stint.reward is not None and stint.reward > RIGHT_ABOVE
        for turn, advantage in zip(stint.turns, values.tolist(), strict=True):
            credits[position][turn.index] = replace(
                credits[position][turn.index],
                advantage=advantage,
                is_right=is_right,
                is_trained=True,
            )
    return credits


def _are_equal(credits: Sequence[Mapping[int, _Credit]]) -> bool:
    """Return whether no turn earned more or less than its group; unscored records do not count."""
    values = [credit.advantage for by_turn in credits for credit in by_turn.values()]
    return all(_is_zero(value) for value in values if not np.isnan(value))


def _is_zero(advantage: float) -> bool:
    return bool(np.isclose(advantage, 0.0, rtol=0.0, atol=1e-12))


def _final_reward(stint: SeatStint, record: DBRecordData, score: float | None) -> float | None:
    """Return a stint's final reward, without step rewards that its record's score includes."""
    if score is None or record.score is None or stint.reward is None or not _has_targets(stint):
        return None
    if stint.has_own_reward:
        return stint.reward + (score - record.score.value)
    if record.score.value_includes_steps:
        return score - sum(reward or 0.0 for reward in step_rewards(record))
    return score


def _score(record: DBRecordData) -> float | None:
    return None if record.score is None else record.score.value


def _verdicts_of_dropped(
    record: DBRecordData, credits: Mapping[int, _Credit], images: ImageBook | None
) -> list[tuple[TurnDrop | None, TurnTokens]]:
    """Return every trainable turn of a record that is left out as a whole."""
    inherited = {turn.id for turn in record.turns if credits[turn.index].is_inherited}
    return [
        ("inherited" if turn.turn_id in inherited else "record", turn)
        for turn in turn_tokens(record.turns, images)
    ]


def _turn_verdicts(
    record: DBRecordData,
    credits: Mapping[int, _Credit],
    algorithm: AlgorithmSection,
    policy_version: int,
    images: ImageBook | None,
) -> list[tuple[TurnDrop | None, TurnTokens]]:
    """Return every trainable turn with its advantage and the reason to drop it, if any."""
    assert record.score is not None, "records without a score were filtered out earlier"
    rebuilt = with_routed_experts(turn_tokens(record.turns, images), record.turns)
    stored = {turn.id: turn for turn in record.turns}
    stored_turns = [stored[turn.turn_id] for turn in rebuilt]
    tokens = [
        _with_teachers(turn, stored_turn, algorithm.teachers)
        for turn, stored_turn in zip(rebuilt, stored_turns, strict=True)
    ]
    credit_by_turn = [credits[turn.index] for turn in stored_turns]
    # If turns have their own rewards or credit, signs are kept: a bad step on the way to a right
    # answer stays bad.
    has_steps = any(reward is not None for reward in step_rewards(record))
    keeps_signs = has_steps or any(credit.is_of_turn for credit in credit_by_turn)
    values = turn_advantages(
        [credit.advantage for credit in credit_by_turn],
        [turn.advantage for turn in stored_turns],
        right=[credit.is_right for credit in credit_by_turn],
        adv_scaling=algorithm.adv_scaling,
        sign_clip=algorithm.sign_clip and not keeps_signs,
    )
    unusable = [
        _unusable_reason(turn, stored_turn, credit, images or ImageBook())
        or _teaching_reason(turn, algorithm)
        for turn, stored_turn, credit in zip(tokens, stored_turns, credit_by_turn, strict=True)
    ]
    # A rollout that was resumed, or took long, contains turns of several versions. The oldest one
    # determines its staleness. Copies, turns of unknown versions and those of untrained seats do not
    # count.
    staleness = [
        turn_staleness(turn, policy_version)
        for turn, reason in zip(tokens, unusable, strict=True)
        if reason not in ("inherited", "untrained_seat", "no_logprobs", "no_version")
    ]
    is_stale = max(staleness, default=0) > algorithm.max_staleness
    credited = [
        _with_advantages(replace(turn, advantage=value), algorithm)
        for turn, value in zip(tokens, values.tolist(), strict=True)
    ]
    return [
        (reason or _drop_reason(turn, algorithm, is_stale=is_stale), turn)
        for turn, reason in zip(credited, unusable, strict=True)
    ]


def _with_teachers(
    turn: TurnTokens, stored: DispatchedSamplingTask, names: Sequence[str]
) -> TurnTokens:
    """Add the logprobs of the teachers, if all of them are there."""
    if not names or not all(name in stored.teacher_logprobs for name in names):
        return turn
    logprobs = np.stack([stored.teacher_logprobs[name] for name in names], axis=1)
    return replace(turn, teacher_logprobs=logprobs)


def _with_advantages(turn: TurnTokens, algorithm: AlgorithmSection) -> TurnTokens:
    """Mix the advantage of the rewards with that of the teachers, if they are part of it."""
    share = algorithm.teacher_share
    if not share or turn.teacher_logprobs is None:
        return turn
    of_teachers = teacher_advantages(turn.teacher_logprobs, turn.behavior_logprobs)
    mixed = (1.0 - share) * turn.advantage + share * algorithm.adv_scaling * of_teachers
    return replace(turn, advantage=float(mixed.mean()), token_advantages=mixed)


def _unusable_reason(
    turn: TurnTokens, stored: DispatchedSamplingTask, credit: _Credit, images: ImageBook
) -> TurnDrop | None:
    """Return why a turn is not the record's to train, or its importance ratios would be wrong."""
    if credit.is_inherited:
        return "inherited"
    if not credit.is_trained:
        return "untrained_seat"
    if np.isnan(turn.behavior_logprobs).any():
        return "no_logprobs"  # the text was supplied rather than sampled
    if (turn.versions == NO_VERSION).any():
        return "no_version"
    if images.stray_tokens(turn.full_ids, turn.images):
        return "placeholder"
    if turn.images and stored.prompt_positions not in (0, turn.num_prompt_tokens):
        return "positions"
    return "penalties" if stored.sampling_params.has_penalties else None


def _teaching_reason(turn: TurnTokens, algorithm: AlgorithmSection) -> TurnDrop | None:
    """Return why teachers cannot judge the turn; None if they can, or there are none."""
    if algorithm.teachers and turn.teacher_logprobs is None:
        return "no_teacher"
    return "temperature" if algorithm.teacher_share and turn.temperature != 1.0 else None


def _drop_reason(
    turn: TurnTokens, algorithm: AlgorithmSection, *, is_stale: bool
) -> TurnDrop | None:
    if is_stale:
        return "stale"
    advantage = turn.advantage
    if turn.token_advantages is not None:
        is_zero = np.allclose(turn.token_advantages, 0.0, rtol=0.0, atol=1e-12)
        return "zero_advantage" if algorithm.drop_zero_advantage and is_zero else None
    if algorithm.minimal_advantage is not None and advantage < algorithm.minimal_advantage:
        return "minimal_advantage"
    if algorithm.drop_zero_advantage and _is_zero(advantage):
        return "zero_advantage"
    if algorithm.skip_non_positive_advantage and advantage <= 0.0:
        return "non_positive_advantage"
    return None


def normalized_over_step(groups: Sequence[SelectedGroup]) -> list[SelectedGroup]:
    """Return the groups with advantages of mean 0 and deviation 1 over the step's targets."""
    turns = [turn for group in groups for turn in group.turns]
    advantages = step_normalized(
        np.array([turn.advantage for turn in turns]), np.array([turn.num_targets for turn in turns])
    )
    values = iter(advantages.tolist())
    return [
        replace(group, turns=tuple(replace(turn, advantage=next(values)) for turn in group.turns))
        for group in groups
    ]
