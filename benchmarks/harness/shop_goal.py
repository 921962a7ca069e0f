"""Decides when a model has learnt the demo: the goal of `benchmarks/time_to_reward.py`.

In: the mean rewards of the steps so far, and the model. Out: whether the last steps are good
enough, and the reward on the held-out questions, measured in the same way for every trainer.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from transformers import AutoTokenizer, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.shop.episodes import MAX_TURNS, Codec, play
from examples.shop.questions import Asked, make_catalogue, split_questions
from examples.shop.server import CATALOGUE, Catalogue

DEMO = Path(__file__).resolve().parents[2] / "assets/demo"
WINDOW = 5
REWARD = 0.8
HELD_OUT = 0.9


def is_rewarded(rewards: Sequence[float]) -> bool:
    """Return whether the mean reward of the last steps is high enough."""
    return len(rewards) >= WINDOW and mean(rewards[-WINDOW:]) >= REWARD


class HeldOut:
    """A demo's held-out questions, each run once with greedy decoding.

    Args:
        questions: those of the short demo by default.
        max_turns: of an attempt.
    """

    def __init__(
        self, questions: Sequence[Asked] | None = None, max_turns: int = MAX_TURNS
    ) -> None:
        self._codec = Codec(AutoTokenizer.from_pretrained(DEMO / "model"))
        self._catalogue: Catalogue = CATALOGUE
        assert self._catalogue == make_catalogue(0)
        num_eval = len((DEMO / "eval.jsonl").read_text(encoding="utf-8").splitlines())
        self._questions = questions or split_questions(0, 2000, num_eval)[1]
        self._max_turns = max_turns

    def reward(self, model: PreTrainedModel) -> float:
        """Return the mean reward of a model."""
        was_training = model.training
        model.eval()
        episodes = play(
            model,
            self._codec,
            self._catalogue,
            self._questions,
            temperature=0.0,
            max_turns=self._max_turns,
        )
        model.train(was_training)
        return mean(episode.reward for episode in episodes)


def training_questions() -> list[dict[str, str]]:
    """Return the demo's training questions in stored form."""
    lines = (DEMO / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
