"""Resolves a model name to a directory, and checks a model's configuration before a run starts.

A local directory is used as it is; a hub id is downloaded once into the hub's cache, and a GGUF file
is converted once. Commands call these checks before they start processes, so this module must not
import torch.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.models.checkpoints.architectures import raw_config
from agentrl.models.checkpoints.checkpoint_files import check_is_checkpoint, tensor_names
from agentrl.models.checkpoints.gguf import converted, gguf_of
from agentrl.models.checkpoints.packaged_model import PACKAGE, packaged_model
from agentrl.runtime.http.http_clients import unreachable_reason

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def resolve_model(
    name_or_path: str, *, with_weights: bool = True, flag: str = "model_name_or_path"
) -> Path:
    """Return the absolute directory of a checkpoint.

    Args:
        name_or_path: a directory, a hub id, a GGUF file or its directory, or `package:NAME`, the
            model in a Python package.
        with_weights: also fetch the weights of a hub id, which may be many gigabytes.
        flag: names the model, for messages.
    """
    path, given = Path(name_or_path).expanduser(), f"--{flag} {name_or_path}"
    if name_or_path.startswith(PACKAGE):
        path = packaged_model(name_or_path, given)
    gguf = gguf_of(path, given)
    if gguf is not None:
        path = converted(gguf, given)
    if not path.is_dir():
        if path.exists():
            raise ConfigError(
                f"{given}: it is a file; name the directory of a checkpoint, or a GGUF file"
            )
        if not _HUB_ID.match(name_or_path) or name_or_path.startswith("."):
            hint = "" if "/" in name_or_path else "; a model on the hub is named OWNER/NAME"
            if "://" in name_or_path:
                hint = f"; a model on the hub is named {'/'.join(name_or_path.split('/')[-2:])}"
            raise ConfigError(f"{given}: no such directory{hint}")
        path = _fetch(name_or_path, with_weights, given)
    else:
        with_weights = True
    check_is_checkpoint(path, given, with_weights=with_weights)
    return path.absolute()


def resolve_tokenizer(name_or_path: str) -> Path:
    """Return the directory of a checkpoint's tokenizer; a local directory needs no weights."""
    path = Path(name_or_path)
    return path if (path / "tokenizer.json").is_file() else resolve_model(name_or_path)


def check_router_replay(model_path: Path) -> None:
    """Refuse `--router_replay` for a model without routers."""
    config = raw_config(model_path)
    if not getattr(config, "num_experts_per_tok", None):
        raise ConfigError(
            f"--router_replay needs a mixture-of-experts model; {config.model_type} at "
            f"{model_path} is dense (omit the flag)"
        )


def check_adapter_targets(model_path: Path, targets: Sequence[str]) -> None:
    """Refuse adapters on layers that the model lacks, or on experts.

    transformers stacks experts, so they are not linear layers.
    """
    config = raw_config(model_path)
    others = [name for name in targets if name not in _ATTENTION_TARGETS]
    if getattr(config, "num_experts_per_tok", None) and others:
        raise ConfigError(
            f"--lora_target_modules {','.join(others)}: {model_path} is a mixture of experts, in "
            "which only attention layers can have adapters; choose from "
            f"{','.join(_ATTENTION_TARGETS)}"
        )
    layers = {name.split(".")[-2] for name in tensor_names(model_path) if "." in name}
    missing = [name for name in targets if layers and name not in layers]
    if missing:
        raise ConfigError(
            f"--lora_target_modules {','.join(missing)}: {model_path} has no layer of this name; its "
            f"layers are {', '.join(sorted(layers))}"
        )


def _fetch(hub_id: str, with_weights: bool, given: str) -> Path:
    # Imported here: only hub ids need it, and the import takes longer than a sampler's start.
    from huggingface_hub import constants, snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    offline_reason = None if constants.HF_HUB_OFFLINE else unreachable_reason(constants.ENDPOINT)
    try:
        ignored = ["*.pth", "original/*", "*.gguf"]
        if not with_weights:
            ignored += ["*.safetensors", "*.bin"]
        directory = snapshot_download(
            hub_id, ignore_patterns=ignored, local_files_only=offline_reason is not None
        )
        return Path(directory)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = offline_reason or " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{given}: no such directory, and the download from the hub failed ({reason})"
        ) from None
