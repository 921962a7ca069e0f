"""Checks the files of a model directory before anything reads its weights.

Input: a directory. Output: the names of its tensors, or a `ConfigError` that says what the directory
contains instead of a checkpoint. Only headers are read, and torch is not imported, so mistakes are
reported within milliseconds.
"""

import json
from pathlib import Path

from agentrl.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100 << 20
"""In bytes; the limit of safetensors itself."""
_LFS_POINTER = b"version https://git-lfs"


def check_is_checkpoint(path: Path, given: str, *, with_weights: bool = True) -> None:
    """Refuse a directory that is not a checkpoint in Hugging Face's layout."""
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ConfigError(f"{given}: {name} is missing{_hint(path)}")
    if not with_weights:
        return
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"{given}: the directory has no *.safetensors weights{_hint(path)}")
    tensor_names(path)


def tensor_names(path: Path) -> frozenset[str]:
    """Return the names of a checkpoint's tensors; empty if its weights were not fetched."""
    index = path / _INDEX
    files = {file.name for file in path.glob("*.safetensors")}
    if index.is_file():
        weight_map = _parse_object(index.read_bytes(), index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{index}: it has no weight_map")
        missing = sorted(set(map(str, weight_map.values())) - files)
        if files and missing:
            raise ConfigError(f"{path}: {missing[0]} is missing, which {_INDEX} names")
        for name in files & set(map(str, weight_map.values())):
            _header(path / name)
        return frozenset(weight_map)
    return frozenset(name for file in files for name in _header(path / file))


def _header(file: Path) -> dict[str, object]:
    """Return the header of a safetensors file, which describes its tensors."""
    with file.open("rb") as stream:
        first_bytes = stream.read(len(_LFS_POINTER))
        if first_bytes == _LFS_POINTER:
            raise ConfigError(
                f"{file} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`"
            )
        size = int.from_bytes(first_bytes[:8], "little")
        stream.seek(8)
        text = stream.read(size) if len(first_bytes) >= 8 and size <= _LARGEST_HEADER else b""
    header = _parse_object(text, file)
    ends = [entry["data_offsets"][1] for entry in header.values() if "data_offsets" in entry]
    if file.stat().st_size < 8 + size + max(ends, default=0):
        raise ConfigError(f"{file} is truncated; copy or download it again")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _parse_object(text: bytes, file: Path) -> dict[str, dict[str, list[int]]]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is damaged; copy or download it again")
    return value


def _hint(path: Path) -> str:
    """Return the end of a message: what a directory contains instead of a checkpoint."""
    if (path / "adapter_config.json").is_file():
        return (
            "; it holds an adapter (LoRA): name its base model, or merge the two first (`agentrl "
            "export` or PEFT's merge_and_unload)"
        )
    if any(path.glob("*.bin")) or any(path.glob("*.pt")):
        return "; pickled weights are not supported: save the model with safe_serialization=True"
    if (path / "tokenizer.model").is_file():
        return "; make it with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    checkpoints = sorted(config.parent for config in path.glob("*/config.json"))
    return f"; did you mean {checkpoints[-1]}?" if checkpoints else ""
