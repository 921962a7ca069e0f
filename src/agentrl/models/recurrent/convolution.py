"""Causal convolutions along the paths of token trees.

A short convolution mixes a token with the few tokens before it. In a row, these are the tokens
before it on its path: the row and K - 1 gathered copies of it are weighted and summed. Channels do
not mix, so ranks that share a row each compute some of the channels for all tokens.

Shape legend: N tokens of the row, P tokens above it, C channels, K width of the kernel.
"""

from typing import Any

import torch
from torch.nn.functional import pad
from transformers.activations import ACT2FN

from agentrl.models.attention.backend import CONTEXT, RowContext

CONVOLUTION = "convolution"


def tree_convolution(original: Any) -> Any:
    """Return the tree form of `causal_conv1d_fn`; without a row it is the function itself."""

    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **keywords: Any,
    ) -> torch.Tensor:
        context = keywords.get(CONTEXT)
        if context is None:
            output: torch.Tensor = original(
                hidden_states, weight, bias, activation=activation, **keywords
            )
            return output
        share = context.share
        # Token by token: gathering rows is many times as fast as gathering columns.
        own_NC = share.to_channels(hidden_states[0].to(weight.dtype).transpose(0, 1))  # noqa: N806
        mixed = _convolve_paths(own_NC, share.own_channels(weight), context)
        output = share.from_channels(mixed)
        if bias is not None:
            output = output + bias
        if activation is not None:
            output = ACT2FN[activation](output)
        return output.transpose(0, 1)[None].to(hidden_states.dtype)

    return convolve


def _convolve_paths(
    hidden_NC: torch.Tensor,  # noqa: N803 - shape suffix
    weight_CK: torch.Tensor,  # noqa: N803
    context: RowContext,
) -> torch.Tensor:
    """Return the weighted sums [N, C]."""
    known = hidden_NC[None, None]
    if context.states is not None:
        (known,) = context.states.extend((CONVOLUTION, context.layer), known)
    width = weight_CK.shape[1]
    keys = torch.from_numpy(context.tree.ancestors(width)).to(hidden_NC.device)
    padded = pad(known[0, 0], (0, 0, 0, 1))  # index P + N: padding before a path
    mixed_NC = hidden_NC * weight_CK[:, -1]  # noqa: N806
    for offset in range(width - 1):
        before_NC = padded.index_select(0, keys[offset])  # noqa: N806
        mixed_NC = torch.addcmul(mixed_NC, before_NC, weight_CK[:, offset])  # noqa: N806
    return mixed_NC
