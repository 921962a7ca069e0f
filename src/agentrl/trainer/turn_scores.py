"""The score of stored turns under any weights: logprobs and likeliest tokens in their places.

All turns, of any number of records and groups, are merged into token trees, as in a step, so that a
shared prefix is computed once. Forward passes only; independent of the store.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from agentrl.config.sections import RootConfig
from agentrl.data import SelectedGroup, build_step
from agentrl.data.tokens import TurnTokens
from agentrl.distributed import Ranks
from agentrl.trainer.bootstrap import learners
from agentrl.trainer.learner.learner import TargetScores
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights
from agentrl.trainer.merging import built_step, with_exact_merge


class ScoredTurns(NamedTuple):
    """The scores of turns under one model."""

    by_turn: dict[str, TargetScores]
    """By the turn's id, in the order of its sampled tokens."""
    num_tokens: int
    """Tokens that went through the model."""


async def score_turns(
    config: RootConfig, ranks: Ranks, weights: StartWeights, turns: Sequence[TurnTokens]
) -> ScoredTurns:
    """Return the scores of turns, at the temperatures at which they were sampled.

    Args:
        config: precision, attention and merging; routers choose for themselves.
        ranks: this process, the only rank.
        weights: of the model, which is loaded until this returns.
        turns: with different ids; at least one.
    """
    model = config.model.model_copy(update={"router_replay": False})
    given = LearnerSettings(
        weights=weights, model=model, trainer=config.trainer, algorithm=None, seed=config.run.seed
    )
    settings = await asyncio.to_thread(with_exact_merge, given, ranks.shape)
    async with learners(ranks, settings, None) as group:
        build = partial(
            build_step,
            [SelectedGroup("scored", (), (), tuple(turns))],
            policy_version=0,
            token_budget=settings.trainer.max_tokens,
        )
        batch = await asyncio.to_thread(built_step, build, settings.trainer.merge)
        found: dict[str, TargetScores] = {}
        for micro_batch in batch.micro_batches[0]:
            # One by one, so that a cancelled task waits for no more than one.
            (scores,) = await group.scores([[micro_batch]])
            edges = [0, *(np.flatnonzero(np.diff(micro_batch.turns)) + 1), len(micro_batch.turns)]
            for first, end in pairwise(edges):
                turn_id = batch.turn_ids[micro_batch.turns[first]]
                found[turn_id] = TargetScores(*(values[first:end] for values in scores))
    return ScoredTurns(found, batch.stats.tokens_packed)
