"""Checks of the model before any process starts: that it exists, can be trained and rendered.

Input: a checked configuration. Output: the model's renderer. Only files of the model are read;
torch is not imported, so mistakes are reported within a second.
"""

from pathlib import Path
from typing import Any

from agentrl.config.sections import ModelSection, RootConfig
from agentrl.config.validation.placement_checks import MeshSizes, check_ranks
from agentrl.errors import ConfigError
from agentrl.models.checkpoints.architectures import (
    check_can_be_computed,
    check_parallel_support,
    decoder_config,
    num_positions,
    raw_config,
)
from agentrl.models.checkpoints.resolve import (
    check_adapter_targets,
    check_router_replay,
    resolve_model,
)
from agentrl.renderers.renderer import Renderer


def check_policy(config: RootConfig, *, trains: bool = True, with_weights: bool = True) -> Renderer:
    """Check the model, its chat template and, for training, its layers and the mesh."""
    path = find_model(config.model, with_weights=with_weights)
    inference, model_config = config.inference, raw_config(path)
    if trains or (inference.inference_backend == "embedded" and not inference.inference_urls):
        trusted = config.model.trust_remote_code
        check_can_be_computed(path, model_config, trust_remote_code=trusted)
    if trains:
        if not config.run.fresh:
            _check_resumes(config, model_config)
        check_ranks(config.trainer)
        check_parallel_support(model_config, MeshSizes.of(config.trainer))
        reference = config.algorithm.reference_model
        if config.algorithm.kl_coefficient and reference is not None:
            resolve_model(reference, with_weights=with_weights, flag="reference_model")
    parser = config.inference.tool_call_parser
    renderer = Renderer.of_policy(config.model, path, tool_call_parser=parser)
    decoder = decoder_config(model_config)
    if isinstance(num_rows := getattr(decoder, "vocab_size", None), int):
        renderer.check_fits(num_rows)
    _check_context_length(config.inference.context_length, decoder)
    if config.tools.tool_server_command is not None:
        renderer.check_tools()
    return renderer


def _check_context_length(requested: int | None, decoder: Any) -> None:
    """Reject a context that is longer than the model's, unless its positions are scaled."""
    length = num_positions(decoder)
    if requested and length and requested > length:
        raise ConfigError(
            f"--context_length {requested}: the model has {length} positions (max_position_embeddings "
            f"in its config.json); lower it to {length} or less"
        )


def find_model(model: ModelSection, *, with_weights: bool = True) -> Path:
    """Return the model's directory."""
    path = resolve_model(model.model_name_or_path, with_weights=with_weights)
    if model.router_replay:
        check_router_replay(path)
    if model.lora_rank:
        check_adapter_targets(path, model.lora_target_modules)
    return path


def _check_resumes(config: RootConfig, model_config: Any) -> None:
    """Check that a resumed run continues with the model of its checkpoints."""
    checkpoints = config.run.output_path.glob("checkpoints/[0-9]*/model/config.json")
    newest = max(checkpoints, default=None)
    if newest is None:
        return
    before, now = _identity(raw_config(newest.parent)), _identity(model_config)
    # An exported configuration omits values that are the defaults of its family.
    differing = [name for name in before.keys() & now.keys() if before[name] != now[name]]
    if differing:
        differences = ", ".join(
            f"{name} {before[name]}, not {now[name]}" for name in sorted(differing)
        )
        raise ConfigError(
            f"--model_name_or_path {config.model.model_name_or_path}: the run trained a different "
            f"model ({newest.parent.parent} has {differences}); use another --run_name"
        )


def _identity(config: Any) -> dict[str, object]:
    """Return those of the identifying fields of a model that its configuration has."""
    decoder = vars(decoder_config(config))
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers")
    fields = {"model_type": config.model_type} | {name: decoder.get(name) for name in sizes}
    return {name: value for name, value in fields.items() if value is not None}
