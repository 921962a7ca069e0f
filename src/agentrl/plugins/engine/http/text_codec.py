"""Token ids to text and back, if the model directory has a tokenizer."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PretrainedConfig

from agentrl.errors import ConfigError
from agentrl.plugins.engine.generation.grammars import GrammarCompiler
from agentrl.plugins.engine.generation.token_sequence import FinishReason, TokenSequence
from agentrl.plugins.engine.http.http_errors import InvalidRequest
from agentrl.renderers.model_files import stop_token_ids

# Stop strings are searched in the last tokens: as many as the longest has characters, plus these.
_STOP_SLACK = 8


class TextCodec:
    """The tokenizer of a model directory, or none."""

    def __init__(self, model_path: str | Path) -> None:
        self._model_path = Path(model_path)
        file = self._model_path / "tokenizer.json"
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

    def end_ids(self, config: PretrainedConfig) -> frozenset[int]:
        """Return the ids that end a text, by the model's configuration and its directory."""
        own = getattr(config, "eos_token_id", None)
        named = stop_token_ids(self._model_path, self._tokenizer)
        return frozenset([*named, *([own] if isinstance(own, int) else own or [])])

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
