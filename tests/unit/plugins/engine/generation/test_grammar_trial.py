"""Grammars that native code dies of, or takes forever for, end a child and not the engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.attacks.hostile_requests import KILLERS
from harness.tiny_tokenizer import write_tokenizer
from tokenizers import Tokenizer

from agentrl.plugins.engine.generation import grammar_trial
from agentrl.plugins.engine.generation.grammar_trial import GrammarTrial
from agentrl.schema.grammar import Grammar


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarTrial]:
    file = write_tokenizer(tmp_path_factory.mktemp("tokenizer")) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    opened = GrammarTrial(Path(file), size, frozenset({end}))
    yield opened
    opened.close()


@pytest.mark.parametrize("grammar", KILLERS, ids=lambda grammar: grammar.kind)
def test_a_grammar_that_kills_is_refused_in_one_line(
    trial: GrammarTrial, grammar: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        trial.check(grammar)
    with monkeypatch.context() as without_children:
        without_children.delattr("subprocess.Popen")
        with pytest.raises(ValueError, match=r"^[^\n]+$"):  # it is not tried again
            trial.check(grammar)
    trial.check(Grammar(kind="regex", text="[ab]{4}"))


def test_after_a_grammar_that_takes_too_long_a_new_process_tests_the_next(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial.check(Grammar(kind="regex", text="[ab]{3}"))
    monkeypatch.setattr(grammar_trial, "_COMPILE_SECONDS", 0.5)
    with pytest.raises(ValueError, match="limits"):
        trial.check(Grammar(kind="json_schema", text='{"type": "integer", "multipleOf": 999983}'))
    monkeypatch.undo()
    trial.check(Grammar(kind="regex", text="[ab]{5}"))


def test_a_malformed_grammar_is_told_what_the_compiler_says(trial: GrammarTrial) -> None:
    with pytest.raises(ValueError, match="pars"):
        trial.check(Grammar(kind="regex", text="[ab"))
