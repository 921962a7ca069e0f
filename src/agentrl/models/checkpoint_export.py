"""Writes a policy as a Hugging Face checkpoint: safetensors, config, tokenizer, chat template.

Readers (inference servers, other tools) may open the directory at any time, so it becomes visible
only when it is complete.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from agentrl.errors import WriteError
from agentrl.models.checkpoints.checkpoint_layout import checkpoint_tensors
from agentrl.models.policy import PolicyModel
from agentrl.runtime.atomic_directory import atomic_directory

TEMPLATE_FILE = "chat_template.jinja"
# Files that inference servers read but a model's `save_pretrained` does not write.
_COPIED_FILES = (
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
        name: source.read_bytes()
        for name in _COPIED_FILES
        if (source := Path(path) / name).is_file()
    }


def save_hf(
    policy: PolicyModel,
    path: str | Path,
    *,
    tokenizer_files: Mapping[str, bytes] | None = None,
    state_dict: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write a checkpoint; `path` appears complete or not at all.

    Args:
        policy: the model whose config (and weights, unless given) are written.
        path: directory to create; an existing one is replaced.
        tokenizer_files: contents by name, see `read_tokenizer_files`.
        state_dict: full weights under the names of the wrapped transformers model, when the
            policy's own parameters are sharded.

    Returns:
        The directory.
    """
    model: PreTrainedModel = policy.model
    state, is_arranged = _arranged_as_checkpoint(model, state_dict or model.state_dict())
    with atomic_weights_directory(Path(path)) as partial:
        model.save_pretrained(partial, state_dict=state, save_original_format=not is_arranged)
        for name, content in (tokenizer_files or {}).items():
            (partial / name).write_bytes(content)
    return Path(path)


def _arranged_as_checkpoint(
    model: PreTrainedModel, state: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], bool]:
    """Return a state as the tensors of a checkpoint, and whether it could be arranged as such.

    Experts are views of their stacks, which transformers would copy. For families whose checkpoints
    have other names or shapes, transformers arranges the state.
    """
    views = dict(view for entry in state.items() for view in checkpoint_tensors(*entry))
    expected = revert_weight_conversion(model, {name: t.to("meta") for name, t in state.items()})
    if {name: t.shape for name, t in expected.items()} != {
        name: t.shape for name, t in views.items()
    }:
        return state, False
    return {name: state.get(name, _with_own_storage(view)) for name, view in views.items()}, True


def _with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return the same memory with its own storage: transformers copies views of one storage."""
    if not (view.is_cpu and view.is_contiguous()):
        return view
    data = torch.from_numpy(view.detach().view(-1).view(torch.uint8).numpy())
    return data.view(view.dtype).view(view.shape)


@contextmanager
def atomic_weights_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory for weights, which becomes `target` when the block ends.

    The files get the directory's read and write permissions. The safetensors writer creates files
    that only their owner can read, but an inference server may run as another user.
    """
    with atomic_directory(target) as partial:
        try:
            yield partial
        except SafetensorError as error:
            raise WriteError(f"cannot write {target}: {error}") from error
        permissions = partial.stat().st_mode & 0o666
        for file in partial.iterdir():
            file.chmod(permissions)
