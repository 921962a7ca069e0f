"""The model and its weights: loading, checking a checkpoint whole, swapping it in."""

import copy
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from agentrl.errors import ConfigError, InferenceError
from agentrl.inference.engine.generation.cached_attention import ENGINE_ATTENTION

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_DOWN = "down_proj"


def load_model(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model for generation.

    Raises:
        ConfigError: the directory is not a checkpoint, or of an unsupported architecture; its
            weights are not those of its config.json.
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
    _check_weights(path, config, dtype)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=ENGINE_ATTENTION
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"--model-path {path}: {_first_line(error)}") from error
    return model


def _check_weights(path: str | Path, config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Compare the files' headers with what config.json asks for, before any memory is taken.

    transformers would first make up what is missing or of another shape: tens of gigabytes where
    config.json is that of a larger model.
    """
    from_config: Callable[[PretrainedConfig], PreTrainedModel] = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = from_config(copy.deepcopy(config))
    state = model.state_dict()
    found = set()
    try:
        for file in _weight_files(path):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if name in state or _EXPERT.fullmatch(name):
                        place_of(name, opened.get_slice(name).get_shape(), state)
                        found.add(name)
        _check_complete(path, found, model)
    except (InferenceError, OSError, SafetensorError) as error:
        raise ConfigError(
            f"--model-path {path}: weights and config.json do not fit: {_first_line(error)}"
        ) from error
    needed, free = model.num_parameters() * dtype.itemsize, psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"--model-path {path}: the weights take {needed / 1e9:.1f} GB in --dtype "
            f"{str(dtype).removeprefix('torch.')}, and {free / 1e9:.1f} GB of memory are free"
        )


def read_weights(path: str | Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Read new weights for a model and check all of them; the model is not touched.

    Args:
        path: Hugging Face directory with safetensors files.
        model: says which tensors of which shapes there have to be.

    Returns:
        The tensors under their names in the files; tied ones may stand under one name only.

    Raises:
        InferenceError: a file or tensor is missing, unknown, malformed or not finite.
    """
    state = model.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors_of(_weight_files(path)):
        place_of(name, tensor.shape, state)
        if problem := not_finite(name, tensor):
            raise InferenceError(problem)
        tensors[name] = tensor
    _check_complete(path, tensors.keys(), model)
    return tensors


def swap_weights(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Copy checked weights into the model; return the model's own tensors that have them now."""
    state = model.state_dict()
    return [place_of(name, it.shape, state).copy_(it) for name, it in tensors.items()]


def place_of(name: str, shape: Sequence[int], state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the part of a model's state that a tensor of a checkpoint is, as a view.

    Files hold every expert by itself; transformers computes with `down_proj` [experts, hidden,
    width] and `gate_up_proj` [experts, 2 * width, hidden], the gates above.

    Raises:
        InferenceError: the model has no such tensor, or of another shape.
    """
    place = state.get(name)
    if match := _EXPERT.fullmatch(name):
        stack, number = state.get(_stack_of(match)), int(match[2])
        if stack is not None and number < len(stack):
            rows = stack[number]
            place = rows if match[3] == _DOWN else rows.chunk(2)[match[3] == "up_proj"]
    if place is None:
        raise InferenceError(f"the model has no tensor {name}")
    if tuple(place.shape) != tuple(shape):
        raise InferenceError(
            f"{name} has shape {tuple(shape)}, the model wants {tuple(place.shape)}"
        )
    return place


def not_finite(name: str, tensor: torch.Tensor) -> str | None:
    """Return what to say of a tensor with NaN or infinities, and None of any other."""
    # One pass without a temporary of the tensor's size; NaN comes out of minimum and maximum.
    low, high = torch.aminmax(tensor)
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return None
    return f"{name} has values that are not finite"


def _weight_files(path: str | Path) -> list[Path]:
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise InferenceError(f"no safetensors files in {path}")
    return files


def _tensors_of(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    yield name, opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InferenceError(f"{file} cannot be read: {_first_line(error)}") from error


def _check_complete(path: str | Path, found: Collection[str], model: PreTrainedModel) -> None:
    """Check that a checkpoint has every tensor, or every expert of a stack."""
    experts = Counter(_stack_of(match) for name in found if (match := _EXPERT.fullmatch(name)))
    for names, parameter in _tied(model):
        if any(name in found for name in names):
            continue
        if not experts[names[0]]:
            raise InferenceError(f"{path} lacks the tensor {names[0]}")
        per_expert = 1 if names[0].endswith(_DOWN) else 2
        if experts[names[0]] < per_expert * len(parameter):
            raise InferenceError(f"experts of {names[0]} are missing")


def _stack_of(expert: re.Match[str]) -> str:
    """Return the name of the tensor in which a model has an expert's."""
    return f"{expert[1]}.{_DOWN if expert[3] == _DOWN else 'gate_up_proj'}"


def _tied(model: PreTrainedModel) -> list[tuple[list[str], torch.nn.Parameter]]:
    """Return every parameter with the names it has."""
    groups: dict[int, tuple[list[str], torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), ([], parameter))[0].append(name)
    return list(groups.values())


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
