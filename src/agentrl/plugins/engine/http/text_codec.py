"""Token ids to text and back, if the model directory has a tokenizer."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentrl.errors import ConfigError
from agentrl.plugins.engine.generation.grammars import GrammarCompiler
from agentrl.plugins.engine.generation.token_sequence import FinishReason, TokenSequence
from agentrl.plugins.engine.http.http_errors import InvalidRequest

# Stop strings are searched in the last tokens: as many as the longest has characters, plus these.
_STOP_SLACK = 8


class TextCodec:
    """The tokenizer of a model directory, or none."""

    def __init__(self, model_path: str | Path) -> None:
        file = Path(model_path) / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        if file.is_file():
            try:
                self._tokenizer = Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises no narrower exception
                raise ConfigError(f"{file}: not a tokenizer ({error})") from error

    @property
    def is_available(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token; 0 without a tokenizer."""
        if self._tokenizer is None:
            return 0
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt."""
        if self._tokenizer is None:
            raise InvalidRequest("this server has no tokenizer; send input_ids")
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of ids."""
        assert self._tokenizer is not None
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def of_token(self, token: int) -> str | None:
        """Return the text of one id."""
        return self.decode([token], skip_special=False) if self._tokenizer is not None else None

    def id_of(self, token: str) -> int | None:
        """Return the id of a token given as text, or None."""
        if self._tokenizer is None:
            return None
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def grammars(self, vocab_size: int, end_ids: frozenset[int]) -> GrammarCompiler:
        """Return a `GrammarCompiler` for this tokenizer."""
        if self._tokenizer is None or not end_ids:
            raise InvalidRequest("a grammar needs a tokenizer and an eos_token")
        return GrammarCompiler(self._tokenizer, vocab_size, end_ids)

    def of_output(
        self, ids: Sequence[int], finish: FinishReason | None, *, skip_special: bool, trim: bool
    ) -> str:
        """Return the text of an output, without its stop string or token unless requested."""
        matched = finish.matched if finish is not None and trim else None
        if isinstance(matched, int):
            ids = ids[:-1]
        text = self.decode(ids, skip_special=skip_special)
        if isinstance(matched, str):
            text = text.partition(matched)[0]
        return text

    def find_stop(self, sequence: TokenSequence) -> str | None:
        """Return the stop string that the newest tokens completed, if any."""
        if self._tokenizer is None:
            return None
        window = max(map(len, sequence.params.stop_strings)) + _STOP_SLACK
        tail = self.decode(sequence.output_ids[-window:], skip_special=False)
        return next((stop for stop in sequence.params.stop_strings if stop in tail), None)


def end_of_text_ids(model_path: str | Path, config: Any, text: TextCodec) -> frozenset[int]:
    """Return the ids that end a text, by the model's, generation and tokenizer configuration."""
    found = _as_ids(getattr(config, "eos_token_id", None))
    found |= _as_ids(_read(Path(model_path) / "generation_config.json").get("eos_token_id"))
    eos = _read(Path(model_path) / "tokenizer_config.json").get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos
    if isinstance(content, str):
        found |= _as_ids(text.id_of(content))
    return frozenset(found)


def _as_ids(value: object) -> set[int]:
    if isinstance(value, int):
        return {value}
    return {item for item in value if isinstance(item, int)} if isinstance(value, list) else set()


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: malformed JSON ({error})") from error
    return content if isinstance(content, dict) else {}
