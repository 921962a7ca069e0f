"""What may come next in a reply that a grammar constrains."""

import json

import numpy as np
import pytest
from harness.tiny_tokenizer import write_tokenizer
from tokenizers import Tokenizer

from agentrl.plugins.engine.generation.grammars import GrammarCompiler
from agentrl.renderers.reply import reply_grammar
from agentrl.schema.grammar import Grammar, GrammarKind

SPARE = 20
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class Check:
    """Walks texts through grammars."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._size = tokenizer.get_vocab_size(with_added_tokens=True)
        end = tokenizer.token_to_id("<|im_end|>")
        assert end is not None
        self._end: int = end
        self._grammars = GrammarCompiler(tokenizer, self._size + SPARE, frozenset({self._end}))

    def compile(self, kind: GrammarKind, text: str) -> None:
        self._grammars.start(Grammar(kind=kind, text=text))

    def allows(self, grammar: Grammar, text: str) -> bool:
        """Whether a reply may be this text, token by token, and end there."""
        constraint = self._grammars.start(grammar)
        bits = np.zeros((2, (self._size + SPARE + 31) // 32), dtype=np.int32)
        for id_ in [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._end]:
            constraint.allow_next(bits, 1)
            allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
            assert not allowed[0].any()
            assert not allowed[1, self._size :].any()  # rows that stand for no token
            if not allowed[1, id_]:
                return False
            assert not constraint.is_over
            constraint.take(id_)
            assert constraint.fault is None
        return constraint.is_over


@pytest.fixture(scope="module")
def check(tokenizer: Tokenizer) -> Check:
    return Check(tokenizer)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"n": 1}', True),
        ('{"n": 1', False),
        ('{"n": "1"}', False),
        ('<think>hm {</think>\n\n{"n": 1}', True),
        ("<think>hm", False),
        ('<think>a</think><think>b</think>{"n": 1}', False),
        ('<tool_call>\n{"name": "x"}\n</tool_call>\n<tool_call>', True),
        ('<think>hm</think><tool_call>{"name": "x"}</tool_call>', True),
        ("hello", False),
        ("<|im_start|>", False),
    ],
)
def test_a_reply_is_json_or_a_call_and_may_think_before(
    check: Check, text: str, expected: bool
) -> None:
    grammar = reply_grammar(SCHEMA, thinking="optional", call_mark="<tool_call>")
    assert check.allows(grammar, text) == expected


def test_thinking_that_the_prompt_began_has_to_end_before_the_json(check: Check) -> None:
    grammar = reply_grammar(SCHEMA, thinking="opened")
    assert check.allows(grammar, 'hm\n</think>\n{"n": 1}')
    assert not check.allows(grammar, '{"n": 1}')


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("regex", "(7|12)", "12"),
        ("ebnf", 'root ::= "yes" | "no"', "no"),
        ("json_schema", '{"type": "object"}', '{"a": [1, {}]}'),
    ],
)
def test_every_kind_of_grammar_holds(
    check: Check, kind: GrammarKind, source: str, text: str
) -> None:
    grammar = Grammar(kind=kind, text=source)
    assert check.allows(grammar, text)
    assert not check.allows(grammar, f"{text}?")


def test_slashes_in_an_expression_inside_a_tag_are_slashes(check: Check) -> None:
    form = {"type": "regex", "pattern": r"a/b\/c\\/d"}
    tag = Grammar(
        kind="structural_tag", text=json.dumps({"type": "structural_tag", "format": form})
    )
    assert check.allows(tag, r"a/b/c\/d")


@pytest.mark.parametrize(
    ("kind", "source", "problem"),
    [
        ("json_schema", "nope", "Expecting value"),
        ("json_schema", '{"a": 1} %json {}', "Extra data"),
        ("json_schema", '{"type": "strng"}', "Invalid type: strng"),
        ("json_schema", '{"not": {"type": "string"}}', "Unimplemented keys"),
        ("regex", "(", "unclosed group"),
        ("ebnf", "root ::= (", "Failed to convert"),
        ("structural_tag", "{}", "format: Field required"),
        ("structural_tag", '{"format": {"type": "triggered_tags"}}', "triggered_tags"),
    ],
)
def test_what_cannot_be_compiled_is_told_in_one_line(
    check: Check, kind: GrammarKind, source: str, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        check.compile(kind, source)
    assert "\n" not in str(caught.value)
