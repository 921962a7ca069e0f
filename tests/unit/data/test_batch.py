import pickle
from typing import Any

import numpy as np
import pytest
from harness.trees import make_record, make_turn, random_group

from agentrl.algorithms.reductions import Reduction
from agentrl.config.sections import AlgorithmSection
from agentrl.data import (
    SelectedGroup,
    StepBatch,
    TokenTree,
    build_step,
    build_training_step,
    select_group,
)
from agentrl.data.rows import Merge

GROUPS = [random_group(seed) for seed in range(3)]


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("merge", ["tree", "linear", "none"])
def test_targets_keep_their_facts_wherever_they_land(merge: Merge, num_ranks: int) -> None:
    batch = build_step(GROUPS, policy_version=3, token_budget=60, merge=merge, num_ranks=num_ranks)
    turns = {turn.turn_id: turn for group in GROUPS for turn in group.turns}
    seen = dict.fromkeys(turns, 0)
    for share in batch.micro_batches:
        assert len(share) == len(batch.micro_batches[0])
        for micro_batch in share:
            for number in np.unique(micro_batch.turns).tolist():
                of_turn = micro_batch.turns == number
                turn = turns[batch.turn_ids[number]]
                seen[turn.turn_id] += 1
                assert micro_batch.row.targets[of_turn].tolist() == turn.output_ids.tolist()
                assert (micro_batch.advantages[of_turn] == turn.advantage).all()
                assert (micro_batch.behavior_logprobs[of_turn] == turn.behavior_logprobs).all()
                assert (micro_batch.staleness[of_turn] == 3 - turn.versions).all()
                records = {batch.record_ids[i] for i in micro_batch.records[of_turn].tolist()}
                assert records == {turn.record_id}
    assert set(seen.values()) == {1}


def test_weights_of_a_step_add_up() -> None:
    reductions: tuple[Reduction, ...] = ("token_mean", "sequence_mean")
    for reduction in reductions:
        batch = build_step(
            GROUPS, policy_version=3, token_budget=50, reduction=reduction, num_ranks=2
        )
        weights = [m.weights.sum() for share in batch.micro_batches for m in share]
        assert sum(weights) == pytest.approx(1.0)


def dropped_and_kept() -> SelectedGroup:
    """Trained are two turns of the first record, of two tokens and of one, and the second record."""
    turns = [
        make_turn("train/0/q0/0", 0, [1], [2, 3]),
        make_turn("train/0/q0/0", 1, [4], [5, 6], parent=0, shared_len=3, advantage=0.0),
        make_turn("train/0/q0/0", 2, [7], [8], parent=1, shared_len=6),
    ]
    others = [make_turn(f"train/0/q0/{n}", 0, [1], [2 + n, 3]) for n in (1, 2)]
    records = [
        make_record(turns, 1.0),
        make_record(others[:1], 0.0, traj_id=1),
        make_record(others[1:], None, traj_id=2),
    ]
    return select_group(records, AlgorithmSection(), policy_version=0)


def weights_by_record(batch: StepBatch) -> list[list[float]]:
    ((row,),) = batch.micro_batches
    return [row.weights[row.records == number].tolist() for number in range(2)]


@pytest.mark.parametrize(
    ("reduction", "first", "second"),
    [
        ("token_mean", 1 / 5, 1 / 5),
        ("sequence_mean", 1 / 6, 1 / 4),
        ("sequence_sum", 1 / 2, 1 / 2),
    ],
)
def test_normalizers_count_only_what_is_trained_on(
    reduction: Reduction, first: float, second: float
) -> None:
    group = dropped_and_kept()
    assert sum(turn.num_targets for turn in group.left_out) == 4
    batch = build_step([group], policy_version=0, token_budget=100, reduction=reduction)
    assert weights_by_record(batch) == [pytest.approx([first] * 3), pytest.approx([second] * 2)]


@pytest.mark.parametrize(
    ("flags", "first", "second"),
    [
        ({}, 1 / 5, 1 / 5),
        ({"token_level_loss": False}, 1 / 6, 1 / 4),
        ({"token_level_loss": False, "skip_length_normalization": True}, 1 / 2, 1 / 2),
        (
            {
                "token_level_loss": False,
                "skip_length_normalization": True,
                "loss_normalizer_length": 50,
            },
            1 / 100,
            1 / 100,
        ),
    ],
)
def test_flags_of_averaging_reach_the_weights(
    flags: dict[str, Any], first: float, second: float
) -> None:
    batch = build_training_step(
        [dropped_and_kept()], AlgorithmSection(**flags), policy_version=0, token_budget=100
    )
    assert weights_by_record(batch) == [pytest.approx([first] * 3), pytest.approx([second] * 2)]


def test_rows_of_a_round_make_as_many_passes_as_the_longest() -> None:
    records = [
        make_record([make_turn(f"train/0/q0/{n}", 0, [n] * size, [9])], float(n > 0), traj_id=n)
        for n, size in enumerate((50, 30, 25))
    ]
    group = select_group(records, AlgorithmSection(), policy_version=0)
    shares = build_step([group], policy_version=0, token_budget=20, num_ranks=2).micro_batches
    assert [[row.num_chunks for row in share] for share in shares] == [[3, 2], [3, 2]]
    assert [[row.row.num_targets for row in share] for share in shares] == [[1, 0], [1, 1]]


@pytest.mark.parametrize(("token_budget", "num_tokens"), [(100, 50 + 2 * 5), (52, 2 * 55)])
def test_groups_share_the_prompt_that_they_have_in_common(
    token_budget: int, num_tokens: int
) -> None:
    def group(question: int) -> SelectedGroup:
        records = [
            make_record(
                [make_turn(f"t/{question}/{n}", 0, [*range(50), 50 + question], [60 + n, 70, 71])],
                float(n),
                task_id=f"t{question}",
                traj_id=n,
            )
            for n in range(2)
        ]
        return select_group(records, AlgorithmSection(), policy_version=0)

    batch = build_step([group(0), group(1)], policy_version=0, token_budget=token_budget)
    assert batch.stats.tokens_packed == num_tokens
    assert batch.stats.num_targets == 4 * 3


def test_a_step_of_nothing_has_no_rows() -> None:
    records = [
        make_record([make_turn(f"t/{n}", 0, [1], [2])], 1.0, task_id="t", traj_id=n)
        for n in range(2)
    ]
    group = select_group(records, AlgorithmSection(), policy_version=0)
    batch = build_step([group], policy_version=0, token_budget=10, num_ranks=2)
    assert batch.micro_batches == ((), ())
    assert (batch.stats.num_targets, batch.stats.tokens_packed) == (0, 0)


def test_statistics_count_tokens_before_and_after_packing() -> None:
    stats = build_step(GROUPS, policy_version=3, token_budget=50).stats
    merged, apart = (
        sum(TokenTree.from_tokens(group.turns, merge=merge).num_tokens for group in GROUPS)
        for merge in ("tree", "none")
    )
    assert merged < stats.tokens_packed < stats.tokens_flat == apart
    assert sum(stats.staleness_histogram.values()) == stats.num_targets
    assert set(stats.staleness_histogram) == {0, 1}


def test_a_rewritten_context_is_a_row_of_its_rollout() -> None:
    turns = [
        make_turn("train/0/q0/0", 0, [1, 2], [3]),
        make_turn("train/0/q0/0", 1, [4], [5], parent=0, shared_len=3),
        make_turn("train/0/q0/0", 2, [6], [7]),
    ]
    other = make_turn("train/0/q0/1", 0, [8], [9])
    records = [make_record(turns, 1.0), make_record([other], 0.0, traj_id=1)]
    group = select_group(records, AlgorithmSection(), policy_version=0)
    stats = build_step([group], policy_version=0, token_budget=100).stats
    assert (stats.tokens_flat, stats.tokens_by_rollout) == (2 + 4 + 1 + 1, 4 + 1 + 1)


def test_pairs_and_blocks_of_attention_by_hand() -> None:
    """Two records of one turn share 199 tokens of prompt and differ in their replies."""
    prompt = list(range(1, 200))
    records = [
        make_record([make_turn(f"train/0/q0/{n}", 0, prompt, [n, 7])], float(n), traj_id=n)
        for n in (0, 1)
    ]
    group = select_group(records, AlgorithmSection(), policy_version=0)
    stats = build_step([group], policy_version=0, token_budget=1000).stats
    assert stats.pairs_flat == 2 * sum(range(1, 201))
    assert stats.pairs_packed == sum(range(1, 200)) + 2 * 200
    # 200 tokens are two blocks of 128: each alone visits three of four; so do the 201 of the tree.
    assert (stats.blocks_flat, stats.blocks_packed) == (6, 3)
    cut = build_step([group], policy_version=0, token_budget=200).stats
    assert (cut.pairs_packed, cut.blocks_packed) == (cut.pairs_flat, cut.blocks_flat)


def test_a_share_of_a_step_travels_between_processes() -> None:
    batch = build_step(GROUPS, policy_version=3, token_budget=50, num_ranks=2)
    sent, received = batch.micro_batches[1], pickle.loads(pickle.dumps(batch.micro_batches[1]))
    assert [m.row.token_ids.tolist() for m in sent] == [m.row.token_ids.tolist() for m in received]
