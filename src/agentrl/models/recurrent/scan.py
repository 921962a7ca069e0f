"""Recurrent scans along the paths of token trees: gated delta rules and Mamba-2.

A scan carries a state from token to token. The segments of a row run in rounds, one call per round,
each from the final state of its path; autograd carries the gradient of a state back to the segment
that produced it. Segments are padded at their ends with steps that leave the state unchanged: no
decay, nothing written.

Heads do not mix, so ranks that share a row each scan some of the heads for all tokens.

Shape legend: N tokens of the row, S segments of a round, L tokens of the longest; X stands for the
further dimensions of a tensor.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad, softplus

from agentrl.models.attention.backend import CONTEXT, RowContext

SCAN = "scan"
_HAS_KERNELS = find_spec("fla") is not None
_BLOCK = 256
"""Tokens of one call of a delta rule without flash-linear-attention. The rule's reference takes its
chunks of 64 tokens out of whole tensors, one after the other; in the backward pass, each chunk then
writes gradients of the whole length. On a CPU, 2,048 tokens in one call take 25 times as long as in
eight."""

_Scan = Callable[[Sequence[torch.Tensor], torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
"""Tensors [S, L, X] and states [S, X] to start from (None: those before a path); returns outputs
[S, L, X] and the final states.
"""


def tree_delta_rule(original: Any) -> Any:
    """Return the tree form of a gated delta rule (Gated DeltaNet, KDA).

    A step whose log-decay `g` and write strength `beta` are 0 leaves the state unchanged.
    """

    def scan(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        **keywords: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        context = keywords.pop(CONTEXT, None)
        if context is None:
            found: tuple[torch.Tensor, torch.Tensor | None] = original(
                query, key, value, g=g, beta=beta, **keywords
            )
            return found
        for name in ("initial_state", "output_final_state", "cu_seqlens"):
            keywords.pop(name, None)

        def run(
            tensors: Sequence[torch.Tensor], states: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            outputs = []
            size = tensors[0].shape[1] if _HAS_KERNELS else _BLOCK
            for q, k, v, decay, strength in zip(*(t.split(size, 1) for t in tensors), strict=True):
                output, states = original(
                    q,
                    k,
                    v,
                    g=decay,
                    beta=strength,
                    initial_state=states,
                    output_final_state=True,
                    **keywords,
                )
                outputs.append(output)
            assert states is not None, "a segment has tokens"
            return torch.cat(outputs, 1), states

        return scan_along_paths(run, (query, key, value, g, beta), context), None

    return scan


def tree_mamba2(original: Any) -> Any:
    """Return the tree form of Mamba-2's scan.

    A step of size 0 leaves the state unchanged, so bias, softplus and limits are applied before
    padding.
    """

    def scan(  # noqa: PLR0913 - the signature of the function that it replaces
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        *,
        chunk_size: int,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **keywords: Any,
    ) -> Any:
        context = keywords.pop(CONTEXT, None)
        if context is None:
            return original(
                x,
                dt,
                A,
                B,
                C,
                chunk_size=chunk_size,
                dt_bias=dt_bias,
                dt_softplus=dt_softplus,
                dt_limit=dt_limit,
                **keywords,
            )
        for name in ("initial_states", "return_final_states"):
            keywords.pop(name, None)
        if dt_bias is not None:
            dt = dt + dt_bias
        if dt_softplus:
            dt = softplus(dt)
        dt = dt.clamp(*dt_limit)
        share = context.share
        if keywords.get("D") is not None:
            keywords["D"] = share.own_channels(keywords["D"])

        def run(
            tensors: Sequence[torch.Tensor], states: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, steps, writes, reads = tensors
            result: tuple[torch.Tensor, torch.Tensor] = original(
                inputs,
                steps,
                share.own_channels(A),
                writes,
                reads,
                chunk_size=chunk_size,
                initial_states=states,
                return_final_states=True,
                **keywords,
            )
            return result

        return scan_along_paths(run, (x, dt, B, C), context)

    return scan


def scan_along_paths(
    scan: _Scan, tensors: Sequence[torch.Tensor], context: RowContext
) -> torch.Tensor:
    """Return the outputs [1, N, X] of a scan over a row.

    Args:
        scan: the layer's own scan of sequences.
        tensors: its inputs, each [1, N, X]; this rank's tokens, if several share the row.
        context: the row; states that pass between chunks go through its `states`.
    """
    tree, states, layer = context.tree, context.states, (SCAN, context.layer)
    own = [context.share.to_channels(tensor[0]) for tensor in tensors]
    device = own[0].device
    padded = [pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, 1)) for tensor in own]
    continued = None if states is None else states.continued(layer, device)
    known_states = None if continued is None else _with_initial_state(continued)
    outputs, tokens = [], []
    for segments in tree.rounds:
        index = torch.from_numpy(segments.tokens.ravel()).to(device)
        parents = torch.from_numpy(segments.parents).to(device)
        start = None if known_states is None else known_states.index_select(0, parents)
        # Indexing with a matrix would take four times as long in the backward pass.
        inputs = [
            tensor.index_select(0, index).unflatten(0, segments.tokens.shape) for tensor in padded
        ]
        output, final_states = scan(inputs, start)
        known_states = (
            _with_initial_state(final_states)
            if known_states is None
            else torch.cat([known_states, final_states])
        )
        places = torch.from_numpy(segments.outputs).to(device)
        outputs.append(output.flatten(0, 1).index_select(0, places))
        tokens.append(segments.tokens.ravel()[segments.outputs])
    assert known_states is not None, "a row has tokens"
    if states is not None and len(tree.exports):
        exports = torch.from_numpy(tree.exports).to(device)
        states.export(layer, known_states.index_select(0, exports))
    inverse = torch.from_numpy(np.argsort(np.concatenate(tokens))).to(device)
    return context.share.from_channels(torch.cat(outputs).index_select(0, inverse))[None]


def _with_initial_state(states: torch.Tensor) -> torch.Tensor:
    """Return states, preceded by the state before a path, which is number 0."""
    return torch.cat([torch.zeros_like(states[:1]), states])
