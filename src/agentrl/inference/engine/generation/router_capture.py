"""Which experts the routers of a mixture-of-experts model send tokens to."""

from collections.abc import Sequence as List
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.inference.engine.generation.sequence import Sequence


class RouterWatch:
    """Listens to a model's routers and writes down what they choose.

    Shape legend: N tokens of a step, L layers, K experts a token, W = L * K.
    """

    def __init__(self, layers: List[Any], num_chosen: int) -> None:
        """Listen to the routers of these decoder layers; layers without one choose nothing (0)."""
        self._num_layers = len(layers)
        self._num_chosen = num_chosen
        self._seen: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(layers):
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(self._listener(number))

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """Return a listener, or None for a model without experts."""
        config, base = model.config, model.base_model
        num_chosen = getattr(config, "num_experts_per_tok", None)
        return None if num_chosen is None else cls(base.layers, num_chosen)  # type: ignore[arg-type]

    def room_for(self, num_tokens: int) -> np.ndarray:
        """Return an array for the choices of a sequence's tokens, int16 [num_tokens, W]."""
        return np.zeros((num_tokens, self._num_layers * self._num_chosen), dtype=np.int16)

    def note(self, owners: List[tuple[Sequence, int, int]]) -> None:
        """Write down what the last step chose.

        Args:
            owners: sequences, first positions and ends of the step's tokens, in their order.
        """
        num_tokens = sum(end - start for _, start, end in owners)
        choices = np.zeros((num_tokens, self._num_layers, self._num_chosen), dtype=np.int16)
        for number, chosen in self._seen.items():
            choices[:, number] = chosen.numpy()
        rows = choices.reshape(num_tokens, -1)
        offset = 0
        for sequence, start, end in owners:
            assert sequence.routes is not None, "every sequence of such a model has room for them"
            sequence.routes[start:end] = rows[offset : offset + end - start]
            offset += end - start

    def _listener(self, number: int) -> Any:
        def hear(_module: object, _arguments: object, output: tuple[torch.Tensor, ...]) -> None:
            self._seen[number] = output[2]

        return hear
