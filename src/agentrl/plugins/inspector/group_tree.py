"""The turns of a group as a text tree, with shared prefixes and branch points.

Input: turns. Output: a flat list of nodes. A node is a range of tokens shared by the same rollouts;
its score and advantage are the means over them, and the node whose children's scores differ most is
the decisive branch point. The trainer's tree (`agentrl.data`) has the tokens that a model reads: it
ends a turn before its last sampled token, and omits turns that are not trained on. Here, answers
that differ in that token part, and every turn is shown.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from agentrl.schema import DispatchedSamplingTask, num_shared_ids, rebuild_full_ids

MAX_NODES = 1500
_HEAD_TOKENS, _TAIL_TOKENS = 120, 40


@dataclass(frozen=True)
class _Path:
    """A context that no turn of its record extends, and the turns on it."""

    ids: np.ndarray
    record_id: str
    turns: tuple[tuple[str, int], ...]
    """Ids of turns, and the lengths of their prompts with their replies."""


@dataclass
class _Node:
    start: int
    end: int
    ids: np.ndarray
    parent: int | None
    records: set[str] = field(default_factory=set)
    turns: list[tuple[str, int]] = field(default_factory=list)
    """Turns that end in this range."""


def group_tree(
    turns: Sequence[DispatchedSamplingTask],
    scores: Mapping[str, float | None],
    advantages: Mapping[str, float],
    forked: Set[str],
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Return the nodes of a group's token tree.

    Forks are branches of the tree, and do not influence where the rollouts diverge.

    Args:
        turns: all turns of one attempt of each record, record by record.
        scores: record id -> score.
        advantages: record id -> the trainer's advantage. Other records get their score minus the
            mean of the rollouts.
        forked: ids of those records that are rollouts of forks.
        tokenizer: turns tokens into text; None leaves the texts out.
    """
    paths = sorted(_paths(turns), key=lambda path: path.ids.astype(">i4").tobytes())
    nodes = _nodes(paths)
    run_records = [node.records - forked for node in nodes]
    means = [
        _mean([scores.get(record_id) for record_id in members or node.records])
        for node, members in zip(nodes, run_records, strict=True)
    ]
    baseline = _mean([score for record_id, score in scores.items() if record_id not in forked])
    relative = {
        record_id: score - baseline
        for record_id, score in scores.items()
        if score is not None and baseline is not None
    } | dict(advantages)
    gaps = _gaps(
        nodes, [mean if members else None for mean, members in zip(means, run_records, strict=True)]
    )
    widest_gap = max(gaps, default=0.0)
    return {
        "num_tokens": sum(node.end - node.start for node in nodes),
        "num_flat_tokens": sum(length for path in paths for _, length in path.turns),
        "is_cut": len(nodes) > MAX_NODES,
        "nodes": [
            {
                "id": number,
                "parent": node.parent,
                "depth": node.start,
                "num_tokens": node.end - node.start,
                "records": sorted(node.records),
                "is_fork": not run_records[number],
                "turns": [turn_id for turn_id, _ in node.turns],
                "score": means[number],
                "advantage": _mean(
                    [relative.get(record_id) for record_id in run_records[number] or node.records]
                ),
                "gap": gaps[number],
                "diverges": widest_gap > 0 and gaps[number] == widest_gap,
                **_texts(node, tokenizer),
            }
            for number, node in enumerate(nodes[:MAX_NODES])
        ],
    }


def _paths(turns: Sequence[DispatchedSamplingTask]) -> Iterator[_Path]:
    for record_id, found in groupby(turns, key=lambda turn: turn.record_id):
        of_record = list(found)
        full = rebuild_full_ids(of_record)
        chains: dict[int, tuple[tuple[str, int], ...]] = {}
        extended = set()
        for turn in of_record:
            extends_parent = turn.parent is not None and turn.shared_len == len(full[turn.parent])
            chain = chains[turn.parent] if extends_parent and turn.parent is not None else ()
            chains[turn.index] = (*chain, (turn.id, len(full[turn.index])))
            if extends_parent:
                extended.add(turn.parent)
        for turn in of_record:
            if turn.index not in extended and len(full[turn.index]):
                yield _Path(full[turn.index], record_id, chains[turn.index])


def _nodes(paths: Sequence[_Path]) -> list[_Node]:
    """Return the compressed trie of sorted paths."""
    nodes: list[_Node] = []
    branch: list[int] = []
    shared_lengths = [0, *(num_shared_ids(one.ids, other.ids) for one, other in pairwise(paths))]
    for path, shared in zip(paths, shared_lengths, strict=True):
        while branch and nodes[branch[-1]].start >= shared:
            branch.pop()
        if branch and nodes[branch[-1]].end > shared:
            _split(nodes, branch[-1], shared)
        if len(path.ids) > shared:
            parent = branch[-1] if branch else None
            nodes.append(_Node(shared, len(path.ids), path.ids, parent))
            branch.append(len(nodes) - 1)
        for number in branch:
            nodes[number].records.add(path.record_id)
        for turn_id, length in path.turns:
            target = next(number for number in branch if nodes[number].end >= length)
            nodes[target].turns.append((turn_id, length))
    return nodes


def _split(nodes: list[_Node], number: int, at: int) -> None:
    """Split a node at a depth; the rest becomes a new node with its children."""
    node = nodes[number]
    rest = _Node(at, node.end, node.ids, number, set(node.records))
    for other in nodes:
        if other.parent == number:
            other.parent = len(nodes)
    nodes.append(rest)
    rest.turns = [turn for turn in node.turns if turn[1] > at]
    node.turns = [turn for turn in node.turns if turn[1] <= at]
    node.end = at


def _gaps(nodes: Sequence[_Node], means: Sequence[float | None]) -> list[float]:
    """Return the spread of the mean scores of each node's children."""
    children: list[list[float]] = [[] for _ in nodes]
    for node, mean in zip(nodes, means, strict=True):
        if node.parent is not None and mean is not None:
            children[node.parent].append(mean)
    return [max(found) - min(found) if found else 0.0 for found in children]


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def _texts(node: _Node, tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is None:
        return {"text": None, "tail": None}
    ids = node.ids[node.start : node.end].tolist()
    if len(ids) <= _HEAD_TOKENS + _TAIL_TOKENS:
        return {"text": tokenizer.decode(ids, skip_special_tokens=False), "tail": None}
    return {
        "text": tokenizer.decode(ids[:_HEAD_TOKENS], skip_special_tokens=False),
        "tail": tokenizer.decode(ids[-_TAIL_TOKENS:], skip_special_tokens=False),
    }
