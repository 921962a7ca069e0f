"""How prefixes are shared: token trees for families that are proven exact on them, where trees pay."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from transformers import PretrainedConfig

from agentrl.data import StepBatch
from agentrl.data.rows import Merge
from agentrl.distributed import MeshShape
from agentrl.errors import ConfigError, TrainingError
from agentrl.models.families import TREE_FAMILIES
from agentrl.models.load import read_config
from agentrl.trainer.learner.merge_check import MergeCheck
from agentrl.trainer.learner.settings import LearnerSettings
from agentrl.trainer.metrics.reporting import write_merge_report

logger = logging.getLogger(__name__)

_MIN_SAVED = 8
"""Tokens that a tree must save for each turn. On a CPU, trees of random bits, which branch at almost
every token, were slower than their turns at 7, and faster at 8.4."""
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Types whose frequencies depend on the longest position of a row: one long branch would change the
hidden states of all other branches."""


def built_step(build: Callable[..., StepBatch], merge: Literal["auto"] | Merge) -> StepBatch:
    """Return a step as `--merge` says; with `auto`, as trees if these save enough tokens."""
    if merge != "auto":
        return build(merge=merge)
    batch = build(merge="tree")
    saved = batch.stats.tokens_flat - batch.stats.tokens_packed
    return batch if saved >= _MIN_SAVED * len(batch.turn_ids) else build(merge="packed")


def merge_error(check: MergeCheck, step: int, output_path: Path) -> float | None:
    """Return the relative error of a step's merged gradient against that of separate turns.

    Returns:
        The error; None if neither loss is finite, in which case the step will be skipped.

    Raises:
        TrainingError: merging changes the gradient; a report is written.
    """
    if not (math.isfinite(check.loss_merged) or math.isfinite(check.loss_separate)):
        return None
    if not check.is_equal:
        path = write_merge_report(output_path, step, check)
        raise TrainingError(
            f"step {step}: the gradient of merged turns differs from that of separate turns by "
            f"{check.relative_error:.3g} (tolerance {check.tolerance:g}); see {path}"
        )
    return check.relative_error


def with_exact_merge(settings: LearnerSettings, shape: MeshShape) -> LearnerSettings:
    """Return the settings, without merging (and a warning) if a model is not proven exact on trees."""
    if settings.trainer.merge == "none":
        return settings
    for path in filter(None, (settings.weights.model_path, settings.reference_path)):
        config = read_config(path, trust_remote_code=settings.model.trust_remote_code)
        reason = why_unmerged(config, trust_remote_code=settings.model.trust_remote_code)
        if reason is None:
            continue
        if shape.cp > 1:
            raise ConfigError(
                f"--cp_size {shape.cp} needs layers that support token trees, which those of "
                f"{config.model_type} models do not: {reason} (use 1)"
            )
        logger.warning(
            "NOT MERGED: %s models train one turn per forward pass, as with --merge none; "
            "gradients are exact, but prefixes are not shared: %s",
            config.model_type,
            reason,
        )
        trainer = settings.trainer.model_copy(update={"merge": "none"})
        return replace(settings, trainer=trainer)
    return settings


def why_unmerged(config: PretrainedConfig, *, trust_remote_code: bool = False) -> str | None:
    """Return why a model is not trained on token trees, or None if it is."""
    if config.model_type not in TREE_FAMILIES:
        return "the family is not among those whose layers are proven exact on token trees"
    if trust_remote_code and getattr(config, "auto_map", None):
        return "its Python code is its own"
    kinds = _rope_types(config) & _LENGTH_DEPENDENT_ROPE
    if kinds:
        return f"its rotary frequencies ({', '.join(sorted(kinds))}) depend on the row's length"
    return None


def _rope_types(config: PretrainedConfig) -> set[str]:
    """Return the types of a model's rotary embeddings; each kind of layer may have its own."""
    parameters: dict[str, Any] = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(one.get("rope_type", "default")) for one in (parameters, *nested)}
