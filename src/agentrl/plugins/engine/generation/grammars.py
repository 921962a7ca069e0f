"""Constrained decoding: which tokens a grammar allows next.

llguidance tracks the text so far and allows what may follow. As in SGLang, a reply ends with an
end-of-text token, which is allowed once the grammar is satisfied.
"""

import json
import re
from functools import lru_cache
from typing import assert_never

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from
from llguidance.numpy import fill_next_token_bitmask
from pydantic import ValidationError
from tokenizers import Tokenizer

from agentrl.schema.grammar import (
    AnyText,
    ConstString,
    Form,
    Grammar,
    InOrder,
    JSONSchema,
    Maybe,
    OneOf,
    Regex,
    StructuralTag,
    Tag,
)

_MAX_COMPILED = 128
"""Number of compiled grammars that are cached."""
_NO_LOG = 0
_ANY_TEXT = r"/(.|\n)*/"
_ESCAPED_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)


class GrammarConstraint:
    """The position of one reply in its grammar."""

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self.is_over = False
        """Whether the reply has taken its end token."""

    def fresh(self) -> "GrammarConstraint":
        """Return an independent copy at the same position."""
        return GrammarConstraint(self._matcher.deep_copy(), self._end_ids)

    def allow_next(self, bits: np.ndarray, row: int) -> None:
        """Set the bits of the tokens that may come next.

        The bits are int32 [R, ceil(V / 32)], the lowest bit of a word first.
        """
        fill_next_token_bitmask(self._matcher, bits, row)

    def take(self, token: int) -> None:
        """Record a drawn token."""
        if token in self._end_ids and self._matcher.is_accepting():
            self.is_over = True
        else:
            self._matcher.consume_token(token)

    @property
    def fault(self) -> str | None:
        """Why the reply cannot continue, such as a limit of the library; None if it can."""
        return _one_line(self._matcher.get_error()) if self._matcher.is_error() else None


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    `vocab_size` is the number of rows of the model's embedding; ids that the tokenizer lacks are
    never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._end_ids = end_ids
        self._tokenizer = _tokenizer_of(tokenizer, vocab_size, end_ids)
        self._compiled = lru_cache(_MAX_COMPILED)(self._compile)

    def start(self, grammar: Grammar) -> GrammarConstraint:
        """Return the constraint of a reply that must follow a grammar, at its start.

        Raises `ValueError` with the reason if it cannot be compiled, within the library's own limits
        on a grammar's size and the work on it (a `multipleOf` of 999983 takes 10 to 20 s).
        """
        return self._compiled(grammar).fresh()

    def _compile(self, grammar: Grammar) -> GrammarConstraint:
        try:
            source = _source(grammar)
        except RecursionError:
            raise ValueError("it nests too deeply") from None
        except ValueError as error:
            raise ValueError(_one_line(str(error))) from None
        matcher = LLMatcher(self._tokenizer, source, log_level=_NO_LOG)
        if matcher.is_error():
            raise ValueError(_one_line(matcher.get_error()))
        return GrammarConstraint(matcher, self._end_ids)


class _GrammarVocabulary:
    """Tokens as bytes, for llguidance.

    llguidance's own tokenizer support treats every added token in angle brackets as a control
    token. Here, tokens such as `<think>` are text unless the tokenizer declares them special.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        byte_tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size)
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        added = json.loads(tokenizer.to_str())["added_tokens"]
        control = {token["id"] for token in added if token["special"]}
        self.tokens = [byte_tokenizer.decode_bytes([id_]) for id_ in range(vocab_size)]
        self.special_token_ids = sorted(control | end_ids | set(range(size, vocab_size)))
        self.eos_token_id = min(end_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        words = text.decode() if isinstance(text, bytes) else text
        ids: list[int] = self._tokenizer.encode(words, add_special_tokens=False).ids
        return ids


def _tokenizer_of(tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> LLTokenizer:
    vocabulary = TokenizerWrapper(_GrammarVocabulary(tokenizer, vocab_size, end_ids))
    return LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=sorted(end_ids))


def _source(grammar: Grammar) -> str:
    """Return a grammar in llguidance's form."""
    kind = grammar.kind
    if kind == "structural_tag":
        try:
            tag = StructuralTag.model_validate_json(grammar.text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            path = ".".join(map(str, first["loc"])) or "structural_tag"
            raise ValueError(f"{path}: {first['msg']}") from None
        return LLMatcher.grammar_from_lark(_Lark(tag.format).text)
    if kind == "json_schema":
        json.loads(grammar.text)  # the library inserts it into a larger text
    return grammar_from(kind, grammar.text)


class _Lark:
    """A structural tag as a grammar in llguidance's Lark dialect, one rule per form."""

    def __init__(self, form: Form) -> None:
        self._rules: list[str] = []
        self.text = f"start: {self._rule(form)}\n"
        self.text += "".join(f"{rule}\n" for rule in self._rules)

    def _rule(self, form: Form) -> str:
        body, attributes = self._body(form), ""
        if isinstance(form, Tag) and isinstance(form.content, AnyText):
            # The first match of the end string ends the content.
            attributes = "[lazy]"
        name = f"form{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _body(self, form: Form) -> str:
        match form:
            case ConstString():
                return json.dumps(form.value)
            case AnyText():
                return _ANY_TEXT
            case Regex():
                return f"/{_ESCAPED_OR_SLASH.sub(_escape_slash, form.pattern)}/"
            case JSONSchema():
                return f"%json {json.dumps(form.json_schema)}"
            case Tag():
                content = (
                    _ANY_TEXT if isinstance(form.content, AnyText) else self._rule(form.content)
                )
                return f"{json.dumps(form.begin)} {content} {json.dumps(form.end)}"
            case InOrder():
                return " ".join(map(self._rule, form.elements))
            case OneOf():
                return " | ".join(map(self._rule, form.elements))
            case Maybe():
                return f"{self._rule(form.content)}?"
        assert_never(form)


def _escape_slash(match: re.Match[str]) -> str:
    return r"\/" if match[0] == "/" else match[0]


def _one_line(message: str) -> str:
    return " ".join(message.split())[:300]
