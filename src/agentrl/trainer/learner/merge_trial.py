"""Tests on a small random copy whether a model can be trained on token trees.

The copy has one layer of each of the model's kinds (`models.small_copy`). The gradients of a random
group in every packing are compared with those of one turn per pass. This takes about a second, and
the outcome is cached by the copy's configuration and the code that computes. A model that fails is
trained with `--merge none`, which is exact for all models.
"""

import hashlib
import json
import logging
from dataclasses import replace
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as PillowImage
from transformers import PretrainedConfig

import agentrl.models
from agentrl.data.random_groups import random_group
from agentrl.data.shown_images import ShownImage
from agentrl.distributed import MeshShape
from agentrl.errors import ConfigError
from agentrl.models.attention.attention_registry import TREE_ATTENTION, set_attention
from agentrl.models.load import read_config, wrap_policy
from agentrl.models.small_copy import (
    small_config,
    small_image_processor,
    small_model,
    text_vocabulary,
)
from agentrl.models.vision.image_encoders import reads_images
from agentrl.models.vision.image_reader import ImageReader
from agentrl.runtime.user_cache import user_cache
from agentrl.trainer.learner.merge_check import packing_errors
from agentrl.trainer.learner.settings import LearnerSettings

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-10
"""The trial computes in float64; the mildest known error of merging moves gradients by 0.04."""
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Types whose frequencies depend on the longest position of a row: one long branch would change the
hidden states of all other branches. Rows of a small copy are too short to reveal this.
"""


def with_exact_merge(settings: LearnerSettings, shape: MeshShape) -> LearnerSettings:
    """Return the settings, without merging (and a warning) if a model is inexact on token trees.

    Raises:
        ConfigError: the mesh divides rows, which needs layers that know token trees.
    """
    if settings.trainer.merge == "none":
        return settings
    for path in (settings.weights.model_path, settings.reference_path):
        if path is None:
            continue
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
    """Return why a model cannot be trained on token trees, or None if it can."""
    kinds = _rope_types(config) & _LENGTH_DEPENDENT_ROPE
    if kinds:
        return f"its rotary frequencies ({', '.join(sorted(kinds))}) depend on the row's length"
    try:
        copy = small_config(config)
        cache_file = _cache_file(copy)  # before a model is built from the copy, which changes it
        error = _cached_error(cache_file)
        if error is None:
            error = _largest_error(copy, trust_remote_code)
            _cache_error(cache_file, copy.model_type, error)
    except Exception as failure:  # noqa: BLE001 - modeling code may raise anything
        first_line = (str(failure).strip().splitlines() or [""])[0]
        return f"a small copy of it could not be tested ({type(failure).__name__}: {first_line})"
    if error <= _TOLERANCE:
        return None
    return f"gradients of a small copy on token trees are off by {error:.2g}"


def _largest_error(copy: PretrainedConfig, trust_remote_code: bool) -> float:
    model = small_model(copy, trust_remote_code=trust_remote_code)
    set_attention(model, TREE_ATTENTION)
    group = random_group(
        np.random.default_rng(0),
        vocabulary=text_vocabulary(copy),
        num_records=3,
        num_turns=3,
        images=_images(copy) if reads_images(copy) else (),
    )
    # The learner's own random state stays as seeded.
    with torch.random.fork_rng(devices=()):
        errors = packing_errors(wrap_policy(model), group)
    return float(np.max(list(errors.values())))


def _images(copy: PretrainedConfig) -> list[ShownImage]:
    """Return two images of one size and one of another."""
    reader, processor = ImageReader(copy), small_image_processor(copy)
    files = []
    for seed, size in enumerate(((16, 16), (16, 16), (40, 16))):
        pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
        buffer = BytesIO()
        PillowImage.fromarray(pixels).save(buffer, format="PNG")
        files.append(buffer.getvalue())
    return [reader.shown(file, processor) for file in files]


def _rope_types(config: PretrainedConfig) -> set[str]:
    """Return the types of a model's rotary embeddings; each kind of layer may have its own."""
    parameters: dict[str, Any] = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(one.get("rope_type", "default")) for one in (parameters, *nested)}


def _cache_file(copy: PretrainedConfig) -> Path:
    digest = hashlib.sha256(copy.to_json_string(use_diff=False).encode())
    for package in ("torch", "transformers"):
        digest.update(version(package).encode())
    for source in sorted(Path(agentrl.models.__path__[0]).rglob("*.py")):
        digest.update(source.read_bytes())
    return user_cache("merge_trials") / f"{digest.hexdigest()}.json"


def _cached_error(path: Path) -> float | None:
    try:
        return float(json.loads(path.read_text())["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing or incomplete: the trial runs again


def _cache_error(path: Path, model_type: str, error: float) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"model_type": model_type, "error": error}) + "\n")
    except OSError as failure:
        logger.info("cannot cache the result of the merge trial: %s", failure)
