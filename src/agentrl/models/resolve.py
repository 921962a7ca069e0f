"""Where a model's files are: a local directory, or a hub id that is fetched once. Torch-free."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import ConfigError

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_NEEDED = ("config.json", "tokenizer.json")
_ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def resolve_model(name_or_path: str) -> Path:
    """Return the absolute directory of a checkpoint.

    Raises:
        ConfigError: there is no such directory, a file is missing from it, or the hub does not
            give the model out.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.exists() or not _HUB_ID.match(name_or_path) or name_or_path.startswith("."):
        raise ConfigError(f"--model_name_or_path {name_or_path}: no such directory")
    return _checked(_fetch(name_or_path))


def resolve_tokenizer(name_or_path: str) -> Path:
    """Return the directory of a checkpoint's tokenizer; a local one needs no weights in it.

    Raises:
        ConfigError: see `resolve_model`.
    """
    path = Path(name_or_path)
    return path if path.is_dir() else resolve_model(name_or_path)


def check_router_replay(model_path: Path) -> None:
    """Refuse to replay the routers of a model that has none.

    Raises:
        ConfigError: the model is dense.
    """
    config = json.loads((model_path / "config.json").read_text())
    if not config.get("num_experts_per_tok"):
        raise ConfigError(
            f"--router_replay needs a mixture-of-experts model; {config.get('model_type')} at "
            f"{model_path} is dense (leave the flag out)"
        )


def check_adapter_targets(model_path: Path, targets: Sequence[str]) -> None:
    """Refuse adapters on experts, which are no linear layers of their own.

    Raises:
        ConfigError: the model is a mixture of experts, and a target is not of its attention.
    """
    config = json.loads((model_path / "config.json").read_text())
    refused = [name for name in targets if name not in _ATTENTION_TARGETS]
    if config.get("num_experts_per_tok") and refused:
        raise ConfigError(
            f"--lora_target_modules {','.join(refused)}: the experts of {model_path} get no adapter; "
            f"give {','.join(_ATTENTION_TARGETS)} or some of these"
        )


def _fetch(hub_id: str) -> Path:
    # Imported here: only hub ids need it, and it takes longer to import than a sampler to start.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(hub_id, ignore_patterns=["*.pth", "original/*", "*.gguf"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"--model_name_or_path {hub_id}: neither a directory here nor to be had from the hub "
            f"({reason})"
        ) from None


def _checked(path: Path) -> Path:
    for name in _NEEDED:
        if not (path / name).is_file():
            raise ConfigError(f"--model_name_or_path {path}: {name} is missing")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"--model_name_or_path {path}: no *.safetensors weights in it")
    return path.absolute()
