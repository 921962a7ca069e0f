"""Checks a model's configuration before its weights are read: how it divides over ranks.

Input: a configuration as read by transformers, or plain `config.json` (`raw_config`), which lets
commands refuse a mesh before anything imports torch. Which models train on token trees is in
`trainer.merging`.
"""

import importlib.util
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from agentrl.errors import ConfigError

ROW_CACHED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Architectures whose keys and values the embedded engine keeps as rows of one tensor."""
FULL_ATTENTION = "full_attention"
_OTHER_HEADS = re.compile(
    r"For(MaskedLM|PreTraining|SequenceClassification|TokenClassification|QuestionAnswering)$"
)
_SIZES = (
    *("hidden_size", "num_hidden_layers", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads"),
)
"""Sizes that every decoder has, if it names them; in others (`head_dim`), 0 may mean the default."""
_AUTO_CLASSES = ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT")


class Sizes(Protocol):
    """Sizes of the mesh's dimensions that divide a model."""

    @property
    def tp(self) -> int:
        """Ranks that split heads, hidden units and vocabulary."""
        ...

    @property
    def ep(self) -> int:
        """Ranks that divide the experts."""
        ...

    @property
    def cp(self) -> int:
        """Ranks that divide the tokens of a row."""
        ...

    @property
    def pp(self) -> int:
        """Ranks that divide the layers."""
        ...


def raw_config(model_path: Path) -> Any:
    """Return a checkpoint's `config.json` as attributes; missing keys are missing attributes."""
    file = model_path / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error})") from None
    except RecursionError:
        raise ConfigError(f"{file}: nested too deeply") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: not a JSON object")
    _check_sizes(values, file)
    _check_implementations(values, file)
    return SimpleNamespace(**{"model_type": None, **values})


def _check_implementations(values: Mapping[str, Any], file: Path) -> None:
    """Refuse attention and experts whose code transformers would load from the Hub.

    It does so without `trust_remote_code`.
    """
    open_: list[tuple[str, Any]] = list(values.items())
    while open_:
        name, value = open_.pop()
        if isinstance(value, Mapping):
            # One implementation for each part of a model is a mapping, too.
            part = name if name.endswith("_implementation") else ""
            open_ += ((part or key, nested) for key, nested in value.items())
        elif name.endswith("_implementation") and "/" in str(value):
            raise ConfigError(
                f"{file}: {name} {value!r} is code on the Hugging Face Hub, which AgentRL does not "
                "run; remove it from the file to use the model's own"
            )


def _check_sizes(values: Mapping[str, Any], file: Path) -> None:
    decoder = values.get("text_config")
    if isinstance(decoder, dict):
        _check_sizes(decoder, file)
    elif decoder is not None:
        raise ConfigError(f"{file}: text_config is not a JSON object")
    for name in _SIZES:
        given = values.get(name)
        # Some families list a size for each layer.
        for size in given if isinstance(given, list) else [given]:
            if size is not None and (type(size) is not int or size < 1):
                raise ConfigError(
                    f"{file}: {name} is {size!r}, not a positive whole number; download the model "
                    "again, or correct the file"
                )


def check_can_be_computed(model_path: Path, config: Any, *, trust_remote_code: bool) -> None:
    """Refuse checkpoints that the trainer and the embedded engine could not load."""
    flag = f"--model_name_or_path {model_path}"
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ConfigError(
            f"{flag} is quantized ({method}), and quantized weights are not supported; use the "
            "model in bfloat16"
        )
    if getattr(config, "auto_map", None) and trust_remote_code:
        return
    for name in getattr(config, "architectures", None) or ():
        if _OTHER_HEADS.search(str(name)):
            raise ConfigError(f"{flag}: {name} is not a causal language model")
    kind, known = config.model_type, _language_models()
    if not known or kind in known:
        return
    if getattr(config, "auto_map", None):
        raise ConfigError(
            f"{flag} brings its own Python code ({kind}); if you trust it, give --trust_remote_code"
        )
    raise ConfigError(
        f"{flag}: model_type {kind!r} of its config.json is not a language model that the "
        "installed transformers supports; docs/models.md lists the models that were tested"
    )


@cache
def _language_models() -> frozenset[str]:
    """Return the model types of transformers' language models; empty if it is not installed.

    They are read from its source, because importing it takes seconds and loads torch.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    source = Path(spec.origin).parent / "models/auto/modeling_auto.py"
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    tables = (text.partition(f"\n{name}_MAPPING_NAMES = ")[2] for name in _AUTO_CLASSES)
    entry = re.compile(r'\("([\w-]+)",')
    return frozenset(name for table in tables for name in entry.findall(table.partition("\n)")[0]))


def has_plain_layers(config: Any) -> bool:
    """Return whether the embedded engine can keep a model's keys and values as rows of one tensor."""
    kinds = set(getattr(config, "layer_types", None) or [FULL_ATTENTION])
    # Mistral's layers have a window without a separate layer type.
    window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    return config.model_type in ROW_CACHED_MODEL_TYPES and kinds == {FULL_ATTENTION} and not window


def decoder_config(config: Any) -> Any:
    """Return the decoder's configuration; multimodal models have a section for it."""
    text = getattr(config, "text_config", None) or config
    return SimpleNamespace(**{"model_type": None, **text}) if isinstance(text, dict) else text


def num_positions(decoder: Any) -> int | None:
    """Return how many positions a decoder has; None if its configuration scales or omits them."""
    length = getattr(decoder, "max_position_embeddings", None)
    rotary = getattr(decoder, "rope_scaling", None) or getattr(decoder, "rope_parameters", None)
    # In quotes, because `partial_rotary_factor` does not scale positions.
    return length if isinstance(length, int) and "'factor'" not in str(rotary) else None


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SCAN_HEADS = ("linear_num_value_heads", "linear_num_heads", "mamba_num_heads", "mamba_n_heads")
_SCAN_GROUPS = ("linear_num_key_heads", "n_groups", "mamba_n_groups")
"""Names of the numbers of heads in recurrent layers; heads of a group share keys and queries."""


_SCAN_KERNELS = {
    "linear_num_value_heads": ("fla", "flash-linear-attention"),
    "linear_attn_config": ("fla", "flash-linear-attention"),
    "mamba_num_heads": ("mamba_ssm", "mamba-ssm"),
    "mamba_n_heads": ("mamba_ssm", "mamba-ssm"),
}
"""Values that only models with recurrent layers have -> the module with their kernels for GPUs, and
the distribution that contains it."""


def missing_scan_kernels(config: Any) -> str | None:
    """Return the distribution with the kernels of a model's recurrent layers if it is not installed.

    transformers then computes them with its reference implementation.
    """
    decoder = decoder_config(config)
    for name, (module, distribution) in _SCAN_KERNELS.items():
        if getattr(decoder, name, None) and importlib.util.find_spec(module) is None:
            return distribution
    return None


def _check_scan_heads(config: Any, shape: Sizes) -> None:
    """Refuse ranks over which the heads of recurrent layers cannot be spread."""
    ranks = shape.cp * shape.tp
    for name in (*_SCAN_HEADS, *_SCAN_GROUPS):
        size = getattr(config, name, None)
        if size and size % ranks and (name in _SCAN_HEADS or ranks % size):
            raise ConfigError(
                f"--cp_size {shape.cp} x --tp_size {shape.tp} does not divide the model's {name} {size}"
            )


def check_parallel_support(config: Any, shape: Sizes) -> None:
    """Refuse meshes that do not fit a model."""
    if getattr(config, "vision_config", None) and max(shape.tp, shape.pp) > 1:
        flag = f"--tp_size {shape.tp}" if shape.tp > 1 else f"--pp_size {shape.pp}"
        raise ConfigError(
            f"{flag}: models that read images ({config.model_type}) cannot be divided this way; "
            "use 1, --cp_size for long rows, and more ranks to shard the weights"
        )
    config = decoder_config(config)
    experts = next(filter(None, (getattr(config, name, None) for name in _EXPERTS)), None)
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", heads)
    layers = getattr(config, "num_hidden_layers", None)
    if layers is not None and shape.pp > layers:
        raise ConfigError(f"--pp_size {shape.pp} is more than the model's {layers} layers")
    divided = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": getattr(config, "intermediate_size", None),
        "vocab_size": getattr(config, "vocab_size", None),
    }
    for name, size in divided.items():
        if size is not None and size % shape.tp:
            raise ConfigError(f"--tp_size {shape.tp} does not divide the model's {name} {size}")
    if shape.ep > 1 and experts is None:
        raise ConfigError(
            f"--ep_size {shape.ep} needs a mixture-of-experts model; {config.model_type} is dense "
            "(use 1)"
        )
    if experts is not None and experts % (shape.ep * shape.tp):
        raise ConfigError(
            f"--ep_size {shape.ep} x --tp_size {shape.tp} does not divide the model's {experts} "
            "experts"
        )
    _check_scan_heads(config, shape)
    if heads is None or groups is None:
        return
    # Context parallelism exchanges tokens for heads, so `cp` must divide the query heads of a `tp`
    # rank. Key-value heads may be fewer than `cp`; each is then repeated on several ranks.
    groups_per_rank = groups // shape.tp
    if heads // shape.tp % shape.cp or (groups_per_rank % shape.cp and shape.cp % groups_per_rank):
        raise ConfigError(
            f"--cp_size {shape.cp} does not divide the model's {heads} query heads ({groups} "
            f"key-value heads) / --tp_size {shape.tp}"
        )
