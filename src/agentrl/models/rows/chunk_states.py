"""`ChunkStates`: the values that pass between the chunks of a row, layer by layer.

There are two forms. Values of tokens (keys and values of attention, inputs of a convolution) are
read by later chunks for the whole path above them. Recurrent states are read only where a later
segment starts.

Shape legend: N tokens of the chunk, P tokens on the path above it, I tokens above whose states it
continues, E of its own tokens whose states later chunks continue.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

LayerKey = tuple[str, int]
"""Kind and number of a layer."""
TokenValues = tuple[torch.Tensor, ...]
"""Values of tokens, each [1, X, tokens, ...]."""


class ChunkStates:
    """Values received from earlier chunks, and values created for later ones."""

    def __init__(
        self,
        num_above: int = 0,
        *,
        above: Mapping[LayerKey, TokenValues] | None = None,
        continued: Mapping[LayerKey, torch.Tensor] | None = None,
        exports: Sequence[int] | np.ndarray = (),
    ) -> None:
        """Start a chunk.

        Args:
            num_above: P.
            above: values of the tokens above, P tokens each; empty in a first chunk.
            continued: states [I, ...] of the tokens above that the chunk's segments continue, in the
                order of `RowTree.imports`.
            exports: E indices of own tokens whose states are to be kept, in ascending order.
        """
        self.num_above = num_above
        self.above = above or {}
        self.continued = continued or {}
        self.exports = np.asarray(exports, dtype=np.int64)
        self.created: dict[LayerKey, TokenValues] = {}
        """Values of the chunk's own tokens, filled in by its forward pass."""
        self.exported_states: dict[LayerKey, torch.Tensor] = {}
        """States [E, ...] after the tokens of `exports`, filled in by its forward pass."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the values received from earlier chunks."""
        for values in self.above.values():
            yield from values
        yield from self.continued.values()

    def extend(self, layer: LayerKey, *values: torch.Tensor) -> TokenValues:
        """Record a layer's own values; return them with those above prepended."""
        self.created[layer] = values
        if not self.num_above:
            return values
        pairs = zip(self.above[layer], values, strict=True)
        return tuple(torch.cat([above, own], dim=2) for above, own in pairs)
