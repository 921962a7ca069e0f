"""The model and its weights: loading, checking a checkpoint whole, swapping it in."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from agentrl.errors import ConfigError, InferenceError
from agentrl.inference.engine.attention import ENGINE_ATTENTION

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def load_model(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model for generation.

    Raises:
        ConfigError: the directory is not a checkpoint, or of an unsupported architecture.
    """
    if not Path(path).is_dir():
        raise ConfigError(f"--model-path {path}: no such directory")
    disable_progress_bar: Callable[[], None] = transformers_logging.disable_progress_bar
    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model-path {path}: {_first_line(error)}") from error
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = config.model_type == "mistral" and config.sliding_window is not None
    if config.model_type not in SUPPORTED_MODEL_TYPES or windowed:
        raise ConfigError(
            f"--model-path {path}: the embedded engine serves {', '.join(SUPPORTED_MODEL_TYPES)} "
            f"with full attention, not {config.model_type!r}; use SGLang for it"
        )
    if layer_types != {"full_attention"}:
        raise ConfigError(
            f"--model-path {path}: the embedded engine serves full attention only, "
            f"not {', '.join(sorted(layer_types))}; use SGLang for it"
        )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=ENGINE_ATTENTION,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"--model-path {path}: {_first_line(error)}") from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ConfigError(f"--model-path {path}: the tensor {missing[0]} is missing")
    return model


def read_weights(path: str | Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Read new weights for a model and check all of them; the model is not touched.

    Args:
        path: Hugging Face directory with safetensors files.
        model: says which tensors of which shapes there have to be.

    Returns:
        The tensors under the model's own names; tied ones may stand under one name only.

    Raises:
        InferenceError: a file or tensor is missing, unknown, malformed or not finite.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise InferenceError(f"no safetensors files in {path}")
    state = model.state_dict()
    tensors = _arranged(_tensors_of(files), state)
    for names in _tied_names(state):
        if not any(name in tensors for name in names):
            raise InferenceError(f"{path} lacks the tensor {names[0]}")
    return tensors


def arrange_weights(
    tensors: Mapping[str, torch.Tensor], model: PreTrainedModel
) -> dict[str, torch.Tensor]:
    """Check some new weights for a model and return them under the model's own names.

    Raises:
        InferenceError: a tensor is unknown, malformed or not finite, or experts are missing.
    """
    return _arranged(tensors.items(), model.state_dict())


def _tensors_of(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    yield name, opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InferenceError(f"{file} cannot be read: {_first_line(error)}") from error


def _arranged(
    named: Iterable[tuple[str, torch.Tensor]], state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    stacks: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        if _EXPERT.fullmatch(name):
            _put_into_stack(stacks, name, tensor, state)
        else:
            tensors[name] = _checked(name, tensor, state)
    for name, stack in stacks.items():
        if stack.isnan().any():
            raise InferenceError(f"experts of {name} are missing, or have NaN in them")
        tensors[name] = _checked(name, stack, state)
    return tensors


def swap_weights(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Copy checked weights into the model; return the model's own tensors that have them now."""
    state = model.state_dict()
    with torch.no_grad():
        return [state[name].copy_(tensor) for name, tensor in tensors.items()]


def _put_into_stack(
    stacks: dict[str, torch.Tensor],
    name: str,
    tensor: torch.Tensor,
    state: Mapping[str, torch.Tensor],
) -> None:
    """Put an expert's weights where the model has those of all experts of a layer.

    Files hold every expert by itself; transformers computes with `down_proj` [experts, hidden,
    width] and `gate_up_proj` [experts, 2 * width, hidden], the gates above.
    """
    match = _EXPERT.fullmatch(name)
    assert match is not None
    owner, number, kind = match[1], int(match[2]), match[3]
    target = f"{owner}.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"
    whole = state.get(target)
    if whole is None or number >= len(whole):
        raise InferenceError(f"the model has no tensor {name}")
    if target not in stacks:
        stacks[target] = torch.full_like(whole, torch.nan)
    stack = stacks[target]
    rows = stack[number] if kind == "down_proj" else stack[number].chunk(2)[kind == "up_proj"]
    if tensor.shape != rows.shape:
        raise InferenceError(
            f"{name} has shape {tuple(tensor.shape)}, the model wants {tuple(rows.shape)}"
        )
    rows.copy_(tensor)


def _checked(name: str, tensor: torch.Tensor, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if name not in state:
        raise InferenceError(f"the model has no tensor {name}")
    if tensor.shape != state[name].shape:
        raise InferenceError(
            f"{name} has shape {tuple(tensor.shape)}, the model wants {tuple(state[name].shape)}"
        )
    # One pass without a temporary of the tensor's size; NaN comes out of minimum and maximum.
    low, high = torch.aminmax(tensor)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise InferenceError(f"{name} has values that are not finite")
    return tensor


def _tied_names(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        groups[tensor.data_ptr()].append(name)
    return list(groups.values())


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
