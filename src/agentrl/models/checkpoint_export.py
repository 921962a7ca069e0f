"""Write a policy as a Hugging Face checkpoint: safetensors, config, tokenizer, chat template.

Readers (inference servers, other tools) may open the directory at any time, so it becomes visible
only when it is complete.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from agentrl.errors import WriteError
from agentrl.models.policy import PolicyModel
from agentrl.runtime.atomic_directory import atomic_directory

TEMPLATE_FILE = "chat_template.jinja"
# Files that inference servers read and `save_pretrained` of a model does not write.
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    TEMPLATE_FILE,
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def read_tokenizer_files(path: str | Path) -> dict[str, bytes]:
    """Return a model directory's tokenizer, template and processor files by name.

    The trainer keeps them in memory, because a long run outlives the checkpoint it was started from:
    old checkpoints are removed while later ones still need the tokenizer.
    """
    return {
        name: source.read_bytes() for name in _COPIED if (source := Path(path) / name).is_file()
    }


def save_hf(
    policy: PolicyModel,
    path: str | Path,
    *,
    tokenizer_files: Mapping[str, bytes] | None = None,
    state_dict: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write a checkpoint; `path` appears whole or not at all.

    Args:
        policy: the model whose config (and weights, unless given) are written.
        path: directory to create; an existing one is replaced.
        tokenizer_files: contents by name, see `read_tokenizer_files`.
        state_dict: full weights under the names of the wrapped transformers model, when the
            policy's own parameters are sharded.

    Returns:
        The directory.

    Raises:
        WriteError: writing failed, for example on a full disk.
    """
    with weights_appear_whole(Path(path)) as partial:
        policy.model.save_pretrained(partial, state_dict=state_dict)
        for name, content in (tokenizer_files or {}).items():
            (partial / name).write_bytes(content)
    return Path(path)


@contextmanager
def weights_appear_whole(target: Path) -> Iterator[Path]:
    """Yield an empty directory for weights, which becomes `target` when the block ends.

    The files get the directory's read and write permissions. The safetensors writer creates files
    that only their owner can read, but an inference server may run as another user.

    Raises:
        WriteError: a file could not be written; the partial directory is removed.
    """
    with atomic_directory(target) as partial:
        try:
            yield partial
        except SafetensorError as error:
            raise WriteError(f"cannot write {target}: {error}") from error
        permissions = partial.stat().st_mode & 0o666
        for file in partial.iterdir():
            file.chmod(permissions)
