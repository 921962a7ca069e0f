"""Replaces recurrent functions of transformers' models with their tree forms.

Modeling files compute a convolution or a scan with a module-level function, to which every layer
passes the keywords of the model's forward pass. These functions are replaced, once per modeling
file, by forms that follow the paths of a row if there is one and are equal to the original
otherwise. To add a kind of recurrence, write its form in this folder and add an entry to
`TREE_FORMS`.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from agentrl.models.attention.backend import CONTEXT
from agentrl.models.recurrent.convolution import tree_convolution
from agentrl.models.recurrent.scan import tree_delta_rule, tree_mamba2

TREE_FORMS: dict[str, Callable[[Any], Any]] = {
    "causal_conv1d_fn": tree_convolution,
    "torch_chunk_gated_delta_rule": tree_delta_rule,
    "chunk_kimi_delta_attention": tree_delta_rule,
    "mamba2_chunk_scan": tree_mamba2,
}
"""Functions in modeling files, with the function that converts each to its tree form."""


def follow_paths(model: nn.Module) -> None:
    """Make a model's convolutions and scans follow the paths of rows."""
    replaced = {}
    for module in model.modules():
        file = sys.modules[type(module).__module__]
        if file.__name__ not in replaced:
            replaced[file.__name__] = _replace_functions(file)
        if replaced[file.__name__] and hasattr(module, "layer_idx"):
            module.register_forward_pre_hook(_enter, with_kwargs=True)


def _replace_functions(file: Any) -> bool:
    """Replace the functions of a modeling file that have tree forms; return whether it has any."""
    names = [name for name in TREE_FORMS if hasattr(file, name)]
    for name in names:
        function = getattr(file, name)
        if not hasattr(function, "follows_paths"):
            form = torch.compiler.disable(TREE_FORMS[name](function))
            form.follows_paths = True
            setattr(file, name, form)
    return bool(names)


def _enter(module: Any, _arguments: object, keywords: dict[str, Any]) -> None:
    # Gradient checkpointing runs layers again, and their hooks with them.
    context = keywords.get(CONTEXT)
    if context is not None:
        context.layer = module.layer_idx
