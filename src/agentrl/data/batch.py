"""`StepBatch`: everything that one optimizer step trains on, as arrays that can travel."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentrl.algorithms.reductions import Reduction, term_weights
from agentrl.data.blocks import BLOCK, plan_blocks
from agentrl.data.expert_replay import agree_on_experts
from agentrl.data.packing import Bin, plan_bins
from agentrl.data.rows import PackedRow, empty_row
from agentrl.data.select import SelectedGroup
from agentrl.data.tokens import TurnTokens
from agentrl.data.tree import Merge, TokenTree, lay_out


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One row and what the loss needs to know about its T target tokens."""

    row: PackedRow
    turns: np.ndarray
    """int64 [T], index into `StepBatch.turn_ids`."""
    records: np.ndarray
    """int64 [T], index into `StepBatch.record_ids`."""
    advantages: np.ndarray
    """float64 [T]."""
    behavior_logprobs: np.ndarray
    """float32 [T]."""
    staleness: np.ndarray
    """int64 [T], policy versions that each token is behind."""
    weights: np.ndarray
    """float64 [T]; the step's loss is the plain sum of weight times loss over all micro-batches
    of all ranks."""
    num_chunks: int = 1
    """Passes in which the row is computed; alike on all ranks for the i-th of their rows."""


@dataclass(frozen=True)
class StepStats:
    """How much went into a step."""

    num_targets: int
    """Sampled tokens in the loss."""
    tokens_flat: int
    """Tokens with every turn in a row of its own."""
    tokens_packed: int
    """Tokens that go through the model: merged as asked, cut prefixes repeated, and not counting
    that rows in chunks are computed again for the backward pass."""
    pairs_flat: int
    """(query, key) pairs that see each other, with every turn in a row of its own."""
    pairs_packed: int
    """The same in the rows as packed."""
    blocks_flat: int
    """Blocks of 128 x 128 pairs that attention visits, with every turn in a row of its own."""
    blocks_packed: int
    """The same in the rows as packed."""
    staleness_histogram: dict[int, int]
    """Policy versions behind -> target tokens."""
    num_expert_conflicts: int = 0
    """Tokens whose experts were chosen in several ways, of which one is replayed."""


@dataclass(frozen=True, eq=False)
class StepBatch:
    """Micro-batches of every rank, equally many, and the facts about them."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    """`[rank][i]`; a rank with less work ends in empty rows."""
    turn_ids: tuple[str, ...]
    record_ids: tuple[str, ...]
    stats: StepStats


def build_step(
    groups: Sequence[SelectedGroup],
    *,
    policy_version: int,
    token_budget: int,
    reduction: Reduction = "token_mean",
    merge: Merge = "tree",
    num_ranks: int = 1,
    attention_cost: float = 0.0,
    normalizer_length: int | None = None,
) -> StepBatch:
    """Merge, weigh and pack the groups of one optimizer step.

    Args:
        groups: of the step; unusable ones add nothing.
        policy_version: version of the weights that the step starts from.
        token_budget: tokens of one forward pass.
        reduction: how targets are averaged, see `term_weights`; a sequence is a Record.
        merge: prefix sharing in the forward pass.
        num_ranks: data-parallel ranks.
        attention_cost: work of a visible pair over that of a token outside attention; ranks get rows
            that take equally long by it.
        normalizer_length: constant length of the `sequence_sum` reduction, see `term_weights`.
    """
    groups, num_expert_conflicts = _with_agreed_experts(groups)
    trees = [TokenTree.from_tokens(group.turns, merge=merge) for group in groups if group.usable]
    branches = [branch for tree in trees for branch in tree.branches]
    turns = [turn for branch in branches for turn in branch.turns]
    record_ids = tuple(dict.fromkeys(turn.record_id for turn in turns))
    record_of = {record_id: index for index, record_id in enumerate(record_ids)}
    records = np.array([record_of[turn.record_id] for turn in turns], dtype=np.int64)
    counts = np.array([turn.num_targets for turn in turns], dtype=np.int64)
    weights = term_weights(
        np.repeat(records, counts), kind=reduction, normalizer_length=normalizer_length
    )
    table = _TargetTable(
        index={turn.turn_id: number for number, turn in enumerate(turns)},
        records=records,
        weights=np.split(weights, np.cumsum(counts)[:-1]) if turns else [],
        policy_version=policy_version,
    )
    shares = plan_bins(
        branches, token_budget=token_budget, num_ranks=num_ranks, attention_cost=attention_cost
    )
    rounds = max((len(share) for share in shares), default=0)
    # Ranks gather the parameters of a sharded model together, so they make equally many passes.
    num_chunks = [
        max(share[number].num_chunks for share in shares if number < len(share))
        for number in range(rounds)
    ]
    micro_batches = tuple(
        tuple(
            table.micro_batch(share[number], passes) if number < len(share) else _empty(passes)
            for number, passes in enumerate(num_chunks)
        )
        for share in shares
    )
    rows = [batch.row for share in micro_batches for batch in share if batch.row.num_targets]
    return StepBatch(
        micro_batches=micro_batches,
        turn_ids=tuple(turn.turn_id for turn in turns),
        record_ids=record_ids,
        stats=replace(
            _stats(turns, policy_version, [bin_ for share in shares for bin_ in share], rows),
            num_expert_conflicts=num_expert_conflicts,
        ),
    )


def _with_agreed_experts(
    groups: Sequence[SelectedGroup],
) -> tuple[list[SelectedGroup], int]:
    settled = [agree_on_experts(group.turns) for group in groups]
    pairs = zip(groups, settled, strict=True)
    return [replace(group, turns=turns) for group, (turns, _) in pairs], sum(
        conflicts for _, conflicts in settled
    )


@dataclass(frozen=True, eq=False)
class _TargetTable:
    """Per-turn facts of the step by which rows are annotated."""

    index: dict[str, int]
    records: np.ndarray
    weights: list[np.ndarray]
    policy_version: int

    def micro_batch(self, bin_: Bin, num_chunks: int) -> MicroBatch:
        turns = [turn for branch in bin_.branches for turn in branch.turns]
        numbers = np.array([self.index[turn.turn_id] for turn in turns], dtype=np.int64)
        counts = np.array([turn.num_targets for turn in turns], dtype=np.int64)
        versions = np.concatenate([turn.versions for turn in turns]).astype(np.int64)
        return MicroBatch(
            row=lay_out(bin_.branches),
            turns=np.repeat(numbers, counts),
            records=np.repeat(self.records[numbers], counts),
            advantages=np.repeat(np.array([turn.advantage for turn in turns]), counts),
            behavior_logprobs=np.concatenate([turn.behavior_logprobs for turn in turns]),
            staleness=self.policy_version - versions,
            weights=np.concatenate([self.weights[number] for number in numbers.tolist()]),
            num_chunks=num_chunks,
        )


def _empty(num_chunks: int) -> MicroBatch:
    whole, real = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64)
    return MicroBatch(
        row=empty_row(),
        turns=whole,
        records=whole,
        advantages=real,
        behavior_logprobs=np.empty(0, dtype=np.float32),
        staleness=whole,
        weights=real,
        num_chunks=num_chunks,
    )


def _stats(
    turns: Sequence[TurnTokens],
    policy_version: int,
    bins: Sequence[Bin],
    rows: Sequence[PackedRow],
) -> StepStats:
    staleness = Counter(
        int(behind) for turn in turns for behind in (policy_version - turn.versions).tolist()
    )
    return StepStats(
        num_targets=sum(turn.num_targets for turn in turns),
        tokens_flat=sum(len(turn.path) for turn in turns),
        tokens_packed=sum(bin_.num_tokens for bin_ in bins),
        pairs_flat=sum(len(turn.path) * (len(turn.path) + 1) // 2 for turn in turns),
        pairs_packed=sum(int(row.positions.sum()) + row.num_tokens for row in rows),
        blocks_flat=sum(_causal_blocks(len(turn.path)) for turn in turns),
        blocks_packed=sum(plan_blocks(row.subtree_ends).num_visited for row in rows),
        staleness_histogram=dict(sorted(staleness.items())),
    )


def _causal_blocks(num_tokens: int) -> int:
    num_blocks = -(-num_tokens // BLOCK)
    return num_blocks * (num_blocks + 1) // 2
