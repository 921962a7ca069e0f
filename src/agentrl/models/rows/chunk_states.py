"""What the chunks of a row pass to one another, layer by layer, and the gradients of it.

There are two forms. Values of tokens (keys and values of attention, inputs of a convolution) are
read by later chunks for the whole path above them. Recurrent states are read only where a later
segment starts.

A layer gathers what it reads when it runs, and its backward pass adds the gradient at once: between
layers, a chunk holds no copy of what is above it. What remains is, for each token and layer, the
values and, during the backward pass, their gradients in float32.

Shape legend: N tokens of the row, P tokens on the path above a chunk, I tokens above whose states it
continues, E of its own tokens whose states later chunks continue.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from agentrl.models.rows.row_chunks import RowChunk

LayerKey = tuple[str, int]
"""Kind and number of a layer."""
TokenValues = tuple[torch.Tensor, ...]
"""Values of tokens, each [1, X, tokens, ...]."""


class RowStates:
    """Values and recurrent states of a row's tokens, and their gradients from later chunks."""

    def __init__(self, num_tokens: int, device: torch.device | None = None) -> None:
        """Start with nothing.

        Args:
            num_tokens: N.
            device: where values and gradients are kept; None: where the layers compute.
        """
        self._num_tokens = num_tokens
        self._device = device
        self._values: dict[LayerKey, TokenValues] = {}
        self._states: dict[LayerKey, dict[int, torch.Tensor]] = {}
        """By the token of the row that they follow."""
        self._value_gradients: dict[LayerKey, TokenValues] = {}
        self._state_gradients: dict[LayerKey, dict[int, torch.Tensor]] = {}

    def store(self, created: "ChunkStates") -> None:
        """Keep what a chunk's forward pass created."""
        chunk = created.chunk
        for layer, values in created.values.items():
            if layer not in self._values:
                self._values[layer] = tuple(self._for_all_tokens(part) for part in values)
            for kept, new in zip(self._values[layer], values, strict=True):
                kept[:, :, chunk.tokens] = new
        for layer, states in created.states.items():
            kept_states = states.to(self._device or states.device)
            self._states.setdefault(layer, {}).update(
                zip(chunk.exported.tolist(), kept_states, strict=True)
            )

    def start_backward(self) -> None:
        """Set all gradients to zero.

        They are summed in float32 or higher: bfloat16 has 8 bits of precision, and a sum over many
        chunks would lose its small terms.
        """
        self._value_gradients = {
            layer: tuple(_zeros_like(part) for part in parts)
            for layer, parts in self._values.items()
        }
        self._state_gradients = {
            layer: {token: _zeros_like(state) for token, state in by_token.items()}
            for layer, by_token in self._states.items()
        }

    def gradients(self, created: "ChunkStates") -> Iterator[torch.Tensor]:
        """Yield the gradient of each of `ChunkStates.created`.

        They are complete after the backward passes of all later chunks.
        """
        chunk = created.chunk
        for layer, values in created.values.items():
            for part, total in zip(values, self._value_gradients[layer], strict=True):
                yield total[:, :, chunk.tokens].to(part)
        for layer, states in created.states.items():
            totals = self._state_gradients[layer]
            yield torch.stack([totals[token] for token in chunk.exported.tolist()]).to(states)

    def values_above(self, layer: LayerKey, chunk: RowChunk, device: torch.device) -> TokenValues:
        """Return a layer's values of the P tokens above a chunk."""

        def received(number: int, kept: torch.Tensor) -> torch.Tensor:
            def add(gradient: torch.Tensor) -> None:
                total = self._value_gradients[layer][number]
                lengths = [stretch.stop - stretch.start for stretch in chunk.stretches_above]
                parts = gradient.split(lengths, dim=2)
                for stretch, part in zip(chunk.stretches_above, parts, strict=True):
                    total[:, :, stretch] += part.to(total)

            stretches = [kept[:, :, stretch].to(device) for stretch in chunk.stretches_above]
            above = stretches[0] if len(stretches) == 1 else torch.cat(stretches, dim=2)
            return _received(above, add)

        return tuple(received(number, kept) for number, kept in enumerate(self._values[layer]))

    def states_above(
        self, layer: LayerKey, chunk: RowChunk, device: torch.device
    ) -> torch.Tensor | None:
        """Return the states [I, ...] that a chunk continues, None if there are none."""
        if layer not in self._states or not len(chunk.continued):
            return None
        tokens = chunk.continued.tolist()

        def add(gradient: torch.Tensor) -> None:
            for token, part in zip(tokens, gradient, strict=True):
                total = self._state_gradients[layer][token]
                total += part.to(total)

        states = torch.stack([self._states[layer][token] for token in tokens])
        return _received(states.to(device), add)

    def _for_all_tokens(self, part: torch.Tensor) -> torch.Tensor:
        shape = (*part.shape[:2], self._num_tokens, *part.shape[3:])
        return part.new_empty(shape, device=self._device or part.device)


class ChunkStates:
    """What the layers of one chunk read from earlier chunks, and create for later ones."""

    def __init__(self, row: RowStates, chunk: RowChunk) -> None:
        """Start a chunk of a row."""
        self.chunk = chunk
        self._row = row
        self.values: dict[LayerKey, TokenValues] = {}
        """Values of the chunk's own tokens, filled in by its forward pass."""
        self.states: dict[LayerKey, torch.Tensor] = {}
        """States [E, ...] after the tokens of `RowChunk.exports`, filled in by its forward pass."""

    @property
    def num_above(self) -> int:
        """P."""
        return len(self.chunk.above)

    def created(self) -> Iterator[torch.Tensor]:
        """Yield all that the forward pass created."""
        for values in self.values.values():
            yield from values
        yield from self.states.values()

    def extend(self, layer: LayerKey, *values: torch.Tensor) -> TokenValues:
        """Record a layer's own values; return them with those above prepended."""
        # A layer that recomputes its activations comes here again. What it computes then is not kept:
        # it would hold these activations until the chunk ends.
        self.values.setdefault(layer, values)
        if not self.num_above:
            return values
        above = self._row.values_above(layer, self.chunk, values[0].device)
        return tuple(torch.cat(pair, dim=2) for pair in zip(above, values, strict=True))

    def export(self, layer: LayerKey, states: torch.Tensor) -> None:
        """Record the states [E, ...] after the tokens of `RowChunk.exports` in a layer."""
        self.states.setdefault(layer, states)

    def continued(self, layer: LayerKey, device: torch.device) -> torch.Tensor | None:
        """Return the states [I, ...] that the chunk continues in a layer, None if there are none.

        They are in the order of `RowTree.imports`.
        """
        return self._row.states_above(layer, self.chunk, device)


class _Received(torch.autograd.Function):
    """Returns a tensor that has no graph as one whose gradient goes to a function."""

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, tensor: torch.Tensor, add: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.add = add
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.add(gradient)
        return None, None, None


def _received(tensor: torch.Tensor, add: Callable[[torch.Tensor], None]) -> torch.Tensor:
    # Autograd calls the backward pass of functions with an input that requires a gradient.
    leaf = torch.zeros((), requires_grad=True)
    received: torch.Tensor = _Received.apply(leaf, tensor, add)  # type: ignore[no-untyped-call]
    return received


def _zeros_like(part: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(part, dtype=torch.promote_types(part.dtype, torch.float32))
