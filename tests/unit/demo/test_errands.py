"""The longer demo: its questions, its demonstrations and its configuration."""

import json
import random
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from agentrl.config.command_line import parse_flags
from agentrl.datasets.question_files import load_questions
from examples.shop.episodes import Codec
from examples.shop.errands import (
    LENGTHS,
    NUM_EVAL,
    NUM_TRAIN,
    SUBJECTS,
    Errand,
    ErrandQuestion,
    demonstrate_errands,
    split_errands,
    write_errands,
)

ASSETS = Path(__file__).resolve().parents[3] / "assets" / "demo"
SOAP = {"soap": {"price": 12, "stock": 30}}
ERRANDS = (Errand("add", 0, 4), Errand("multiply", 1, 2), Errand("subtract", 1, 9))
TEXTS = {
    "stock": ("soap: packs once arrive 4, load 2, lose 9?", "59"),
    "price": ("soap: cost with delivery 4, packs 2, rebate 9?", "23"),
}


def test_each_errand_computes_with_the_result_of_the_one_before() -> None:
    questions = [ErrandQuestion(subject, "soap", ERRANDS) for subject in SUBJECTS]
    found = {one.subject.lookup: (one.text, one.answer(SOAP)) for one in questions}
    assert found == TEXTS


def test_no_wording_belongs_to_two_errands() -> None:
    wordings = [w for subject in SUBJECTS for pair in subject.wordings.values() for w in pair]
    assert len(set(wordings)) == len(wordings) == 12


def test_the_files_are_what_the_seed_draws(tmp_path: Path) -> None:
    write_errands(tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (ASSETS / "errands" / name).read_bytes()


def test_training_and_evaluation_share_no_text_and_no_pair() -> None:
    train, evaluation = split_errands(0, NUM_TRAIN, NUM_EVAL)
    assert len({one.text for one in train + evaluation}) == NUM_TRAIN + NUM_EVAL
    pairs = [{(one.subject.lookup, one.item) for one in part} for part in (train, evaluation)]
    assert not pairs[0] & pairs[1]
    for one in train + evaluation:
        numbers = [errand.n for errand in one.errands]
        assert len(set(numbers)) == len(numbers)
        assert [errand.operation for errand in one.errands].count("multiply") <= 1


def test_demonstrations_do_every_errand_and_misread_some() -> None:
    codec = Codec(AutoTokenizer.from_pretrained(ASSETS / "errands/model"))
    questions, _ = split_errands(0, NUM_TRAIN, 0)
    num_right, lengths, draw = 0, set(), random.Random(0)
    for question in questions[:300]:
        episode = demonstrate_errands(codec, question, draw)
        text = codec.decode(episode.ids[len(codec.prompt(question.text)) :])
        calls = [
            json.loads(call) for call in re.findall("<tool_call>(.*?)</tool_call>", text, re.S)
        ]
        results = re.findall("<tool_response>\n(.*?)\n</tool_response>", text, re.S)
        lengths.add(episode.num_turns)
        assert calls[0]["arguments"] == {"item": question.item}
        for call, before, errand in zip(calls[1:], results, question.errands, strict=False):
            assert call["arguments"] == {"a": int(before), "b": errand.n}
        assert text.endswith(f"<answer>{results[-1]}</answer>")
        right = [question.subject.lookup, *(errand.operation for errand in question.errands)]
        num_right += [call["name"] for call in calls] == right
    assert lengths == {length + 2 for length in LENGTHS} == {5, 6, 7, 8}
    # Chains can learn from this share, and the rest is left to learn.
    assert 0.15 < num_right / 300 < 0.45


def test_the_configuration_names_files_that_ship(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse_flags(["--config", "assets/demo/errands.yaml", "--run_name", "errands"])
    assert config.data.train_file is not None
    assert config.data.eval_file is not None
    asked = load_questions(config.data.train_file, config.data)
    assert len(asked) == NUM_TRAIN
    assert len(load_questions(config.data.eval_file, config.data)) == NUM_EVAL
    # The longest attempt, with a turn to spare, and the questions for every step.
    assert config.rollout.max_turns > max(LENGTHS) + 2
    needed = config.trainer.max_steps * (config.trainer.groups_per_step or 0)
    assert NUM_TRAIN * config.data.num_train_epochs >= 4 * needed
    codec = Codec(AutoTokenizer.from_pretrained(config.model.model_name_or_path))
    longest = max(len(codec.prompt(one.query)) for one in asked)
    assert longest + 40 * config.rollout.max_turns < config.sampling.max_prompt_tokens
