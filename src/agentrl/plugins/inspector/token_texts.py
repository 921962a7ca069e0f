"""The text of single tokens, as far as a run's tokenizer is on this machine.

Input: token ids. Output: one text per token. A character sampled as several tokens is shown at the
first of them; the others have an empty text. Models are never fetched from a hub.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from agentrl.config.loading import read_yaml
from agentrl.config.named_files import existing_or_shipped
from agentrl.errors import ConfigError
from agentrl.schema import Run

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_TOKENS_PER_CHARACTER = 8
"""An upper bound."""


def tokenizer_of(run: Run | None, config_path: Path) -> Tokenizer | None:
    """Return the tokenizer of a run's model; None if its directory is not on this machine.

    Others may have written the database, so only a model that ships with AgentRL, or that the run's
    configuration at `config_path` names too, is read; an imported run names none.
    """
    name = None if run is None or run.is_imported else run.config.get("model_name_or_path")
    if not isinstance(name, str):
        return None
    is_shipped = Path(name).parts[:1] == ("assets",) and ".." not in Path(name).parts
    if not is_shipped and name != _own_model(config_path):
        return None
    path = existing_or_shipped(Path(name)) / "tokenizer.json"
    return _read(path) if path.is_file() else None


def _own_model(config_path: Path) -> object:
    try:
        return read_yaml(config_path).get("model_name_or_path")
    except ConfigError:  # this installation has no configuration of the run
        return None


@lru_cache(maxsize=4)
def _read(path: Path) -> Tokenizer | None:
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 - the library raises nothing narrower; ids are shown instead
        return None


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text."""
    anchor = tokenizer.encode("a", add_special_tokens=False).ids[:1]
    anchor_text = tokenizer.decode(anchor, skip_special_tokens=False)

    def decode_after_anchor(runs: list[list[int]]) -> list[str]:
        # Decoded after another token, because some tokenizers drop the first token's leading space.
        texts = tokenizer.decode_batch([[*anchor, *run] for run in runs], skip_special_tokens=False)
        return [text.removeprefix(anchor_text) for text in texts]

    texts = decode_after_anchor([[int(token_id)] for token_id in ids])
    position = 0
    while position < len(texts):
        if _BROKEN in texts[position]:
            ends = range(position + 2, min(position + _MAX_TOKENS_PER_CHARACTER, len(ids)) + 1)
            for end in ends:
                (whole,) = decode_after_anchor([[int(token_id) for token_id in ids[position:end]]])
                if _BROKEN not in whole:
                    texts[position:end] = [whole] + [""] * (end - position - 1)
                    position = end - 1
                    break
        position += 1
    return texts
