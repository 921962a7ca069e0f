"""`StepBatch`: everything that one optimizer step trains on, as arrays that ranks can exchange.

Input: selected groups. Output: micro-batches for every rank, built on rank 0 and sent to the
others. The weight of each target token in the loss is fixed here, over the whole step, before the
tokens are spread over rows and ranks. Works on arrays, independent of the store.

A bin holds the consecutive branches of one row in depth-first order. Where a tree is cut, the next
bin repeats the shared prefix. Every target token is in exactly one bin, so the sum over bins is
exact. A tree with a path longer than the token budget becomes one bin and is computed in chunks
(`models.policy`); cutting it would repeat its long prefix.

The budget bounds memory, which grows with the number of tokens. Time also grows with the pairs that
attention visits, which dominate on long paths. Ranks wait for each other in every layer, so the bins
of one round should take the same time.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentrl.algorithms.reductions import Reduction, reduction_kind, target_weights
from agentrl.config.sections import AlgorithmSection
from agentrl.data.rows import (
    BLOCK,
    Branch,
    Merge,
    PackedRow,
    TokenTree,
    empty_row,
    lay_out,
    plan_blocks,
)
from agentrl.data.select import SelectedGroup, normalized_over_step
from agentrl.data.tokens import TurnTokens, agree_on_experts

_BISECTIONS = 20
"""Steps of the search for the cost limit. They find it to a precision of one millionth."""


@dataclass(frozen=True, eq=False)
class Bin:
    """The branches of one row; the first one carries its whole path."""

    branches: tuple[Branch, ...]
    num_tokens: int
    num_pairs: int
    """Visible (query, key) pairs."""
    num_chunks: int = 1
    """Passes needed to stay within the budget; more than 1 only for a long tree."""

    @classmethod
    def of(cls, branches: Sequence[Branch], num_chunks: int = 1) -> "Bin":
        """Return the bin of these branches."""
        return cls(
            tuple(branches),
            num_tokens=sum(branch.num_new_tokens for branch in branches),
            num_pairs=sum(branch.num_new_pairs for branch in branches),
            num_chunks=num_chunks,
        )

    def cost(self, attention_cost: float) -> float:
        """Return the row's estimated time, in units of one token's cost outside attention."""
        return self.num_tokens + attention_cost * self.num_pairs


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One row and, for each of its T target tokens, the inputs of the loss."""

    row: PackedRow
    turns: np.ndarray
    """int64 [T], index into `StepBatch.turn_ids`."""
    records: np.ndarray
    """int64 [T], index into `StepBatch.record_ids`."""
    advantages: np.ndarray
    """float64 [T]."""
    behavior_logprobs: np.ndarray
    """float32 [T]."""
    teacher_logprobs: np.ndarray
    """float32 [T, K] of the K teachers; K is 0 without teachers, and 1 in made-up rows, where one
    stands for all."""
    staleness: np.ndarray
    """int64 [T], policy versions that each token is behind."""
    weights: np.ndarray
    """float64 [T]; the step's loss is the plain sum of weight times loss over all micro-batches
    of all ranks."""
    num_chunks: int = 1
    """Passes in which the row is computed; equal on all ranks for rows of the same round."""


@dataclass(frozen=True)
class StepStats:
    """Sizes of a step, before and after merging."""

    num_targets: int
    """Sampled tokens in the loss."""
    tokens_flat: int
    """Tokens if every turn were a separate row."""
    tokens_by_rollout: int
    """Tokens if every rollout were a separate row; one for each context, if it was rewritten."""
    tokens_packed: int
    """Tokens that go through the model, including prefixes that are repeated where a tree is cut,
    and excluding the recomputation of rows in chunks."""
    pairs_flat: int
    """Visible (query, key) pairs if every turn were a separate row."""
    pairs_packed: int
    """Visible (query, key) pairs in the packed rows."""
    blocks_flat: int
    """128 x 128 blocks of pairs that attention visits if every turn were a separate row."""
    blocks_packed: int
    """128 x 128 blocks of pairs that attention visits in the packed rows."""
    staleness_histogram: dict[int, int]
    """Policy versions behind -> target tokens."""
    num_expert_conflicts: int = 0
    """Tokens shared by turns whose servers chose different experts; one choice is replayed."""
    merge: Merge = "tree"
    """Which prefixes the rows share."""


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The micro-batches of every rank, equal in number, and figures about the step."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    """`[rank][i]`; a rank with fewer rows is padded with empty ones."""
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
        groups: of the step; groups without turns to train on are skipped.
        policy_version: version of the weights that the step starts from.
        token_budget: tokens of one forward pass; `none` passes every turn whole.
        reduction: how targets are averaged, see `target_weights`; a sequence is a Record.
        merge: prefix sharing in the forward pass; `packed` shares none, and `none` also means one
            turn per forward pass.
        num_ranks: data-parallel ranks.
        attention_cost: cost of a visible pair in units of a token's cost outside attention; rows
            are balanced over ranks by this estimate of time.
        normalizer_length: constant length of the `sequence_sum` reduction, see `target_weights`.
    """
    shared = [agree_on_experts(turns) for turns in _sharing_turns(groups, token_budget)]
    trees = [TokenTree.from_tokens(turns, merge=merge) for turns, _ in shared]
    branches = [branch for tree in trees for branch in tree.branches]
    turns = [turn for branch in branches for turn in branch.turns]
    record_ids = tuple(dict.fromkeys(turn.record_id for turn in turns))
    record_of = {record_id: index for index, record_id in enumerate(record_ids)}
    records = np.array([record_of[turn.record_id] for turn in turns], dtype=np.int64)
    counts = np.array([turn.num_targets for turn in turns], dtype=np.int64)
    weights = target_weights(
        np.repeat(records, counts), kind=reduction, normalizer_length=normalizer_length
    )
    table = _TargetTable(
        index={turn.turn_id: number for number, turn in enumerate(turns)},
        records=records,
        weights=np.split(weights, np.cumsum(counts)[:-1]) if turns else [],
        policy_version=policy_version,
    )
    shares = plan_bins(
        branches,
        token_budget=token_budget,
        num_ranks=num_ranks,
        attention_cost=attention_cost,
        one_path_each=merge == "none",
    )
    rounds = max((len(share) for share in shares), default=0)
    # Every pass gathers sharded parameters (a collective), so all ranks make the same number.
    num_chunks = [
        max(share[number].num_chunks for share in shares if number < len(share))
        for number in range(rounds)
    ]
    micro_batches = tuple(
        tuple(
            table.micro_batch(share[number], passes) if number < len(share) else empty_batch(passes)
            for number, passes in enumerate(num_chunks)
        )
        for share in shares
    )
    if num_ranks > 1:
        micro_batches = _with_stand_ins(micro_batches)
    rows = [batch.row for share in micro_batches for batch in share if batch.row.num_targets]
    return StepBatch(
        micro_batches=micro_batches,
        turn_ids=tuple(turn.turn_id for turn in turns),
        record_ids=record_ids,
        stats=replace(
            _stats(turns, policy_version, [bin_ for share in shares for bin_ in share], rows),
            num_expert_conflicts=sum(num_conflicts for _, num_conflicts in shared),
            merge=merge,
        ),
    )


def build_training_step(
    groups: Sequence[SelectedGroup],
    algorithm: AlgorithmSection,
    *,
    policy_version: int,
    token_budget: int,
    merge: Merge = "tree",
    num_ranks: int = 1,
    attention_cost: float = 0.0,
) -> StepBatch:
    """Build the step that the algorithm's flags describe; see `build_step`.

    Args:
        groups: as selected by the same flags.
        algorithm: how advantages are normalized and target tokens are averaged.
        policy_version: version of the weights that the step starts from.
        token_budget: tokens of one forward pass.
        merge: prefix sharing in the forward pass.
        num_ranks: data-parallel ranks.
        attention_cost: see `build_step`.
    """
    if algorithm.advantage_estimator == "reinforce_plus_plus":
        groups = normalized_over_step(groups)
    return build_step(
        groups,
        policy_version=policy_version,
        token_budget=token_budget,
        reduction=reduction_kind(
            token_level_loss=algorithm.token_level_loss,
            skip_length_normalization=algorithm.skip_length_normalization,
        ),
        merge=merge,
        num_ranks=num_ranks,
        attention_cost=attention_cost,
        normalizer_length=algorithm.loss_normalizer_length,
    )


def _sharing_turns(
    groups: Sequence[SelectedGroup], token_budget: int
) -> list[Sequence[TurnTokens]]:
    """Return the turns of each tree.

    Groups share one, since their questions often follow the same tools and system prompt. A group
    with a path beyond the budget, which is computed in chunks on one rank, has its own.
    """
    trees: list[Sequence[TurnTokens]] = []
    shared: list[TurnTokens] = []
    for group in groups:
        if not group.usable:
            continue
        if max(len(turn.path) for turn in group.turns) > token_budget:
            trees.append(group.turns)
        else:
            shared += group.turns
    return [*trees, shared] if shared else trees


@dataclass(frozen=True, eq=False)
class _TargetTable:
    """Per-turn values of the step, looked up when a row becomes a micro-batch."""

    index: dict[str, int]
    """Turn id -> index of the turn in the step."""
    records: np.ndarray
    """int64 [turns], index of each turn's record."""
    weights: list[np.ndarray]
    """Weights of each turn's target tokens, float64 [T] per turn."""
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
            advantages=np.concatenate([_token_advantages(turn) for turn in turns]),
            behavior_logprobs=np.concatenate([turn.behavior_logprobs for turn in turns]),
            teacher_logprobs=np.concatenate([_teacher_logprobs(turn) for turn in turns]),
            staleness=self.policy_version - versions,
            weights=np.concatenate([self.weights[number] for number in numbers.tolist()]),
            num_chunks=num_chunks,
        )


def _token_advantages(turn: TurnTokens) -> np.ndarray:
    if turn.token_advantages is not None:
        return turn.token_advantages
    return np.full(turn.num_targets, turn.advantage)


def _teacher_logprobs(turn: TurnTokens) -> np.ndarray:
    if turn.teacher_logprobs is not None:
        return turn.teacher_logprobs
    return np.empty((turn.num_targets, 0), dtype=np.float32)


def _with_stand_ins(
    shares: tuple[tuple[MicroBatch, ...], ...],
) -> tuple[tuple[MicroBatch, ...], ...]:
    """If some rows have images, let the others encode the smallest image of the step."""
    images = [
        image
        for share in shares
        for batch in share
        if batch.row.images is not None
        for image in batch.row.images.images
    ]
    if not images:
        return shares
    smallest = min(images, key=lambda image: (image.num_positions, image.key))
    return tuple(
        tuple(replace(batch, row=replace(batch.row, stand_in=smallest)) for batch in share)
        for share in shares
    )


def empty_batch(num_chunks: int) -> MicroBatch:
    """Return a micro-batch that adds nothing to loss and gradients (see `empty_row`)."""
    no_integers, no_floats = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64)
    return MicroBatch(
        row=empty_row(),
        turns=no_integers,
        records=no_integers,
        advantages=no_floats,
        behavior_logprobs=np.empty(0, dtype=np.float32),
        teacher_logprobs=np.empty((0, 1), dtype=np.float32),
        staleness=no_integers,
        weights=no_floats,
        num_chunks=num_chunks,
    )


def _stats(
    turns: Sequence[TurnTokens],
    policy_version: int,
    bins: Sequence[Bin],
    rows: Sequence[PackedRow],
) -> StepStats:
    staleness = Counter(
        int(num_versions)
        for turn in turns
        for num_versions in (policy_version - turn.versions).tolist()
    )
    return StepStats(
        num_targets=sum(turn.num_targets for turn in turns),
        tokens_flat=sum(len(turn.path) for turn in turns),
        tokens_by_rollout=_tokens_by_rollout(turns),
        tokens_packed=sum(bin_.num_tokens for bin_ in bins),
        pairs_flat=sum(len(turn.path) * (len(turn.path) + 1) // 2 for turn in turns),
        pairs_packed=sum(int(row.positions.sum()) + row.num_tokens for row in rows),
        blocks_flat=sum(_causal_blocks(len(turn.path)) for turn in turns),
        blocks_packed=sum(plan_blocks(row.subtree_ends).num_visited for row in rows),
        staleness_histogram=dict(sorted(staleness.items())),
    )


def _tokens_by_rollout(turns: Sequence[TurnTokens]) -> int:
    longest: dict[tuple[str, int], int] = {}
    for turn in turns:
        context = (turn.record_id, turn.chain)
        longest[context] = max(longest.get(context, 0), len(turn.path))
    return sum(longest.values())


def _causal_blocks(num_tokens: int) -> int:
    """Return the blocks on and below the diagonal of a causal mask."""
    num_blocks = -(-num_tokens // BLOCK)
    return num_blocks * (num_blocks + 1) // 2


def plan_bins(
    branches: Sequence[Branch],
    *,
    token_budget: int,
    num_ranks: int = 1,
    attention_cost: float = 0.0,
    one_path_each: bool = False,
) -> tuple[tuple[Bin, ...], ...]:
    """Pack branches into bins and assign them to ranks.

    The number of rounds is the smallest that the budget allows. Within it, a bisection minimizes the
    cost of the most expensive bin, and bins of similar cost share a round.

    Args:
        branches: of all trees of the step, in depth-first order tree by tree.
        token_budget: tokens of one pass, repeated prefixes included.
        num_ranks: data-parallel ranks.
        attention_cost: cost of a visible pair in units of a token's cost outside attention.
        one_path_each: every branch becomes a separate bin of any length: for models whose layers do
            not support token trees.

    Returns:
        The bins of each rank: those in chunks first, then by falling cost. Ranks may differ by one
        bin; `build_step` pads with empty rows.
    """
    if one_path_each:
        bins_of_one = [Bin.of([branch.alone()]) for branch in branches]
        return _balance_across_ranks(bins_of_one, num_ranks, attention_cost)
    unchunked: list[Branch] = []
    chunked: list[Bin] = []
    for tree in _by_tree(branches):
        if max(len(branch.path) for branch in tree) <= token_budget:
            unchunked += tree
        else:
            num_tokens = sum(branch.num_new_tokens for branch in tree)
            chunked.append(Bin.of(tree, num_chunks=-(-num_tokens // token_budget)))
    bins = _fill_bins(unchunked, token_budget, attention_cost)
    if num_ranks > 1 and bins:
        num_rounds = -(-(len(bins) + len(chunked)) // num_ranks)
        max_bins = num_rounds * num_ranks - len(chunked)
        low, high = 0.0, max(bin_.cost(attention_cost) for bin_ in bins)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            smaller = _fill_bins(unchunked, token_budget, attention_cost, middle)
            if len(smaller) <= max_bins:
                bins, high = smaller, middle
            else:
                low = middle
    return _balance_across_ranks(chunked + bins, num_ranks, attention_cost)


def _by_tree(branches: Sequence[Branch]) -> list[list[Branch]]:
    trees: list[list[Branch]] = []
    for branch in branches:
        if branch.shared == 0:
            trees.append([])
        trees[-1].append(branch)
    return trees


def _fill_bins(
    branches: Sequence[Branch],
    token_budget: int,
    attention_cost: float,
    max_cost: float = float("inf"),
) -> list[Bin]:
    """Fill bins in order; start a new one if a branch would exceed the budget or the cost."""
    bins: list[list[Branch]] = []
    tokens, cost = 0, 0.0
    for branch in branches:
        new_tokens = branch.num_new_tokens
        new_cost = new_tokens + attention_cost * branch.num_new_pairs
        if not bins or tokens + new_tokens > token_budget or cost + new_cost > max_cost:
            bins.append([branch.alone()])
            tokens = len(branch.path)
            cost = tokens + attention_cost * bins[-1][0].num_new_pairs
        else:
            bins[-1].append(branch)
            tokens, cost = tokens + new_tokens, cost + new_cost
    return [Bin.of(bin_) for bin_ in bins]


def _balance_across_ranks(
    bins: list[Bin], num_ranks: int, attention_cost: float
) -> tuple[tuple[Bin, ...], ...]:
    """Assign bins to ranks in rounds of falling cost.

    The direction alternates between rounds. No rank then always receives the most expensive bin
    of a round, so the totals are balanced as well.
    """
    shares: list[list[Bin]] = [[] for _ in range(num_ranks)]
    ordered = sorted(bins, key=lambda bin_: (-bin_.num_chunks, -bin_.cost(attention_cost)))
    for number, bin_ in enumerate(ordered):
        round_, position = divmod(number, num_ranks)
        shares[position if round_ % 2 == 0 else num_ranks - 1 - position].append(bin_)
    return tuple(tuple(share) for share in shares)
