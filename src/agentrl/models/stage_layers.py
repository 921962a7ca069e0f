"""Reduces a model to the layers of one pipeline stage.

A stage is the family's own model with placeholders for the layers of other stages: no forward pass
has to be rewritten, and every parameter keeps its name. Placeholders pass hidden states through;
the one before the stage's own layers inserts those received from the previous stage. The first
stage has the embedding, the last one the final norm and the head. A head that is tied to the
embedding is on both, and each gets the sum of both gradients.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.models.families import STAGE_FAMILIES


@dataclass(frozen=True, eq=False)
class ModelStage:
    """The part of a model that a stage has."""

    number: int
    count: int
    entry: "_OtherStageLayer | None"
    """Where the hidden states of the previous stage enter; None on the first stage."""
    other_stages: tuple[str, ...]
    """Name prefixes of the parameters that other stages have."""
    tied: str | None
    """Name of the parameter that is both embedding and head, if this stage has it."""

    @property
    def is_last(self) -> bool:
        """Whether the stage has the head."""
        return self.number == self.count - 1

    def is_tied(self, name: str) -> bool:
        """Return whether a policy's parameter is both embedding and head."""
        return self.tied is not None and name.endswith(f".{self.tied}")

    def has(self, name: str) -> bool:
        """Return whether this stage has a parameter of the whole model, by name."""
        return not name.startswith(self.other_stages) if self.other_stages else True


WHOLE = ModelStage(0, 1, None, (), None)
"""The only stage of a model without a pipeline."""


class _OtherStageLayer(nn.Module):
    """Placeholder for a layer of another stage."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Models read string attributes of their layers, such as the kind of attention.
        strings = {name: value for name, value in vars(layer).items() if isinstance(value, str)}
        self.__dict__.update(strings)
        self.stage_input: torch.Tensor | None = None
        """Hidden states to insert."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states if self.stage_input is None else self.stage_input


def keep_stage(model: PreTrainedModel, number: int, count: int) -> ModelStage:
    """Remove the parts of a model that belong to other stages (in place)."""
    if count == 1:
        return WHOLE
    base: Any = model.base_model
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    is_first, is_last = number == 0, number == count - 1
    # Rounded up: surplus layers go to early stages, because the last one has the head.
    start, end = (-(-len(base.layers) * edge // count) for edge in (number, number + 1))
    removed = []
    for index, layer in enumerate(base.layers):
        if not start <= index < end:
            removed.append(names[id(layer)])
            base.layers[index] = _OtherStageLayer(layer)
    if not is_last:
        for name, part in list(base.named_children()):
            if part not in (embedding, base.layers) and next(part.parameters(), None) is not None:
                removed.append(names[id(part)])
                setattr(base, name, nn.Identity())
        if not (is_tied and is_first):
            removed.append(names[id(head)])
            model.set_output_embeddings(nn.Identity())
    if not is_first and not (is_tied and is_last):
        removed.append(names[id(embedding)])
        model.set_input_embeddings(nn.Identity())
    return ModelStage(
        number,
        count,
        entry=None if is_first else base.layers[start - 1],
        other_stages=tuple(f"{name}." for name in removed),
        tied=f"{names[id(embedding)]}.weight" if is_tied and (is_first or is_last) else None,
    )


def check_stages(config: PretrainedConfig, count: int) -> None:
    """Refuse a pipeline for families whose layers may pass on more than hidden states."""
    if count > 1 and config.model_type not in STAGE_FAMILIES:
        raise ConfigError(
            f"--pp_size {count}: {config.model_type} models cannot be trained in a pipeline; its "
            "layers are not known to pass on only hidden states; use 1"
        )
