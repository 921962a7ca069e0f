"""Which weights a trainer begins with: the given model's, or those of its newest checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from agentrl.config.sections import ModelSection
from agentrl.errors import ConfigError
from agentrl.models.adapter_files import CONFIG_FILE, AdapterShape, is_adapter, read_shape
from agentrl.models.resolve import resolve_model
from agentrl.trainer.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class StartWeights:
    """What every rank loads."""

    model_path: Path
    """Hugging Face directory; with an adapter, the one of the base model."""
    adapter_path: Path | None = None
    """Directory of the adapter to go on with."""


def start_weights(model: ModelSection, checkpoint: Checkpoint | None) -> StartWeights:
    """Return where the weights are.

    Raises:
        ConfigError: the model is not there, or the checkpoint is not of a training as `model` says.
    """
    if checkpoint is None:
        return StartWeights(resolve_model(model.model_name_or_path))
    path = checkpoint.model_path
    if not model.lora_rank:
        if is_adapter(path):
            raise ConfigError(
                f"{checkpoint.path} holds an adapter; resume it with --lora_rank "
                f"{read_shape(path).rank}, or use another --run_name"
            )
        return StartWeights(path)
    if not is_adapter(path):
        raise ConfigError(
            f"{checkpoint.path} holds all weights of a run without an adapter; resume it without "
            f"--lora_rank, or use another --run_name with --model_name_or_path {path}"
        )
    _check_same(adapter_shape(model), read_shape(path), path)
    return StartWeights(resolve_model(model.model_name_or_path), path)


def adapter_shape(model: ModelSection) -> AdapterShape | None:
    """Return the adapter that the flags ask for; None when all weights are trained."""
    if not model.lora_rank:
        return None
    base = Path(model.model_name_or_path).expanduser()
    return AdapterShape(
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        target_modules=model.lora_target_modules,
        base=str(base.absolute()) if base.is_dir() else model.model_name_or_path,
    )


def _check_same(wanted: AdapterShape | None, found: AdapterShape, path: Path) -> None:
    assert wanted is not None, "an adapter is asked for"
    if (wanted.rank, wanted.alpha) != (found.rank, found.alpha):
        raise ConfigError(
            f"{path} is an adapter of --lora_rank {found.rank} --lora_alpha {found.alpha}; resume "
            "with these, or use another --run_name"
        )
    if wanted.base != found.base:
        raise ConfigError(
            f"{path} is an adapter of {found.base}; give that as --model_name_or_path (or, if it was "
            f"moved, correct {CONFIG_FILE} there)"
        )
