"""What can be said of the model before a process starts: is it there, can it be trained and shown.

In goes a checked configuration, out comes the model's renderer. Only files of the model are read;
torch is not imported, so that a mistake costs a second.
"""

from pathlib import Path

from agentrl.config.rank_checks import MeshSizes, check_machines
from agentrl.config.sections import ModelSection, RootConfig
from agentrl.models.architectures import (
    check_can_be_computed,
    check_parallel_support,
    raw_config,
)
from agentrl.models.resolve import check_adapter_targets, check_router_replay, resolve_model
from agentrl.renderers.renderer import Renderer


def check_policy(config: RootConfig, *, trains: bool = True, with_weights: bool = True) -> Renderer:
    """Check the model, its chat template and, for training, its layers and the mesh.

    Args:
        config: the checked configuration.
        trains: whether our trainer computes with it.
        with_weights: see `resolve_model`.

    Raises:
        ConfigError: the model is missing, or the mesh does not fit it.
    """
    path = find_model(config.model, with_weights=with_weights)
    inference, found = config.inference, raw_config(path)
    if trains or (inference.inference_backend == "embedded" and not inference.inference_urls):
        trusted = config.model.trust_remote_code
        check_can_be_computed(path, found, trust_remote_code=trusted)
    if trains:
        check_machines(config)
        check_parallel_support(found, MeshSizes.of(config.trainer))
        reference = config.algorithm.reference_model
        if config.algorithm.kl_coefficient and reference is not None:
            resolve_model(reference, with_weights=with_weights, flag="reference_model")
    parser = config.inference.tool_call_parser
    renderer = Renderer.of_policy(config.model, path, tool_call_parser=parser)
    if config.tools.tool_server_command is not None:
        renderer.check_shows_results()
    return renderer


def find_model(model: ModelSection, *, with_weights: bool = True) -> Path:
    """Return the model's directory.

    Args:
        model: names it, and what is asked of it.
        with_weights: see `resolve_model`.

    Raises:
        ConfigError: it is missing, or the model cannot have what the flags ask for.
    """
    path = resolve_model(model.model_name_or_path, with_weights=with_weights)
    if model.router_replay:
        check_router_replay(path)
    if model.lora_rank:
        check_adapter_targets(path, model.lora_target_modules)
    return path
