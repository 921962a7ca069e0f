"""Scores of stored turns are those of separate forward passes, whatever is merged and cut."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.training import MakeConfig, Player, train_tasks
from transformers import AutoModelForCausalLM

from agentrl.data.tokens import TurnTokens, turn_tokens
from agentrl.store import TrajectoryStore
from agentrl.trainer.bootstrap import rank_of
from agentrl.trainer.learner.settings import StartWeights
from agentrl.trainer.turn_scores import score_turns

torch.set_num_threads(1)


@pytest.fixture
async def turns(store: TrajectoryStore, model_path: Path) -> list[TurnTokens]:
    await store.tasks.add(train_tasks(2, 3))
    player = Player(model_path)
    await player.play_groups(store, [[1.0, 0.0, 1.0]] * 2, num_turns=3)
    ids = [f"train/0/q{group}/{number}" for group in range(2) for number in range(3)]
    return turn_tokens(await store.turns.of_records(ids))


@pytest.mark.parametrize(("merge", "budget"), [("tree", 8192), ("tree", 16), ("none", 8192)])
async def test_scores_are_those_of_separate_passes(
    turns: list[TurnTokens], make_config: MakeConfig, model_path: Path, merge: str, budget: int
) -> None:
    config = make_config(torch_dtype="float64", merge=merge, max_tokens=str(budget))
    with rank_of(config) as ranks:
        found = await score_turns(config, ranks, StartWeights(model_path), turns)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64).eval()
    assert found.by_turn.keys() == {turn.turn_id for turn in turns}
    for turn in turns:
        ids = torch.from_numpy(turn.full_ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, turn.num_prompt_tokens - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[0, turn.num_prompt_tokens :, None])[:, 0]
        scores = found.by_turn[turn.turn_id]
        assert np.abs(scores.logprobs - expected.numpy()).max() < 1e-6
        assert scores.likeliest.tolist() == logits.argmax(-1).tolist()
    separate = sum(len(turn.path) for turn in turns)
    assert found.num_tokens == separate if merge == "none" else found.num_tokens < separate
