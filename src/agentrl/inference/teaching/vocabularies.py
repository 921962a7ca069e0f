"""Compares tokenizers: another model's logprobs mean nothing if its token ids are other texts."""

from pathlib import Path

from tokenizers import Tokenizer

from agentrl.errors import ConfigError
from agentrl.renderers.model_files import read_model_files


def check_same_tokens(given: str, path: Path, policy_path: Path) -> None:
    """Refuse a model whose token ids are not the policy's.

    Args:
        given: names the model, for the message.
        path: directory of its tokenizer.
        policy_path: directory of the policy's.
    """
    theirs = _tokens(read_model_files(path).tokenizer)
    ours = _tokens(read_model_files(policy_path).tokenizer)
    for token_id in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(token_id), theirs.get(token_id)
        if mine != other:
            raise ConfigError(
                f"{given}: its tokenizer ({path}) is not the policy's ({policy_path}): token "
                f"{token_id} is {_shown(other)} there and {_shown(mine)} for the policy; choose a "
                "model with the policy's tokenizer"
            )


def _tokens(tokenizer: Tokenizer) -> dict[int, str]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)
