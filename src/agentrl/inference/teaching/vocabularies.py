"""Compares tokenizers: a teacher's logprobs mean nothing if its token ids are other texts."""

from pathlib import Path

from tokenizers import Tokenizer

from agentrl.errors import ConfigError
from agentrl.renderers.model_files import read_model_files


def check_same_tokens(teacher: str, teacher_path: Path, policy_path: Path) -> None:
    """Refuse a teacher whose token ids are not the policy's."""
    theirs = _tokens(read_model_files(teacher_path).tokenizer)
    ours = _tokens(read_model_files(policy_path).tokenizer)
    for token_id in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(token_id), theirs.get(token_id)
        if mine != other:
            raise ConfigError(
                f"--teacher {teacher}: its tokenizer ({teacher_path}) is not the policy's "
                f"({policy_path}): token {token_id} is {_shown(other)} for the teacher and "
                f"{_shown(mine)} for the policy; choose a teacher with the policy's tokenizer"
            )


def _tokens(tokenizer: Tokenizer) -> dict[int, str]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)
