"""LoRA adapters alongside the model: any number of them, chosen per request.

Sequences of different adapters share a step. Every linear layer computes all tokens together; the
contribution of each adapter is then added for the tokens that use it.

Shape legend: N tokens of a step, I and O inputs and outputs of a layer, r rank.
"""

import asyncio
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from agentrl.errors import InferenceError
from agentrl.inference.wire import new_rid

_PREFIX = "base_model.model."
_UNSUPPORTED = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")


@dataclass(frozen=True, eq=False)
class Adapter:
    """One loaded adapter. Loading it again creates a new one, so caches are never mixed up."""

    name: str
    path: str
    layers: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """Name of a linear layer -> A transposed [I, r], and B transposed and scaled [r, O]."""
    namespace: str = field(default_factory=new_rid)
    """Namespace of the prefixes that were computed with it."""


def read_adapter(name: str, path: str, model: PreTrainedModel) -> Adapter:
    """Read an adapter in PEFT's format and check all of it."""
    try:
        config = json.loads((Path(path) / "adapter_config.json").read_text())
        tensors = load_file(Path(path) / "adapter_model.safetensors")
        rank, scaling = int(config["r"]), float(config["lora_alpha"]) / int(config["r"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, SafetensorError) as error:
        raise InferenceError(f"cannot read a LoRA adapter from {path}: {error}") from error
    for feature in _UNSUPPORTED:
        if config.get(feature):
            raise InferenceError(f"{path}: adapters with {feature} are not supported")
    modules = dict(model.named_modules())
    layers = {}
    for key in sorted(tensors):
        layer, _, part = key.removeprefix(_PREFIX).rpartition(".lora_")
        if part == "B.weight" and f"{_PREFIX}{layer}.lora_A.weight" in tensors:
            continue
        a, b = tensors[key], tensors.get(f"{_PREFIX}{layer}.lora_B.weight")
        linear = modules.get(layer)
        if part != "A.weight" or b is None or not isinstance(linear, nn.Linear):
            raise InferenceError(f"{path}: the model has no layer for {key}")
        expected = ((rank, linear.in_features), (linear.out_features, rank))
        if (tuple(a.shape), tuple(b.shape)) != expected:
            raise InferenceError(
                f"{path}: {layer} expects A and B of shapes {expected[0]}, {expected[1]}"
            )
        if not bool(torch.isfinite(a).all() & torch.isfinite(b).all()):
            raise InferenceError(f"{path}: {layer} has values that are not finite")
        layers[layer] = (
            a.to(model.device, model.dtype).T.contiguous(),
            (b.to(model.device, model.dtype) * scaling).T.contiguous(),
        )
    return Adapter(name, path, layers)


class LoadedAdapters(Mapping[str, Adapter]):
    """The adapters that requests may name. Used from the event loop only."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._loaded: dict[str, Adapter] = {}
        self._retired: dict[Adapter, asyncio.Future[None]] = {}
        self._loading = asyncio.Lock()

    def __getitem__(self, name: str) -> Adapter:
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)

    async def load(self, name: str, path: str) -> None:
        """Load an adapter while generations continue."""
        async with self._loading:
            if name in self._loaded:
                raise InferenceError(f"an adapter {name} is already loaded")
            self._loaded[name] = await asyncio.to_thread(read_adapter, name, path, self._model)

    def retire(self, name: str) -> "asyncio.Future[None]":
        """Retire an adapter; the future completes once `release_unused` finds it unused."""
        adapter = self._loaded.pop(name, None)
        if adapter is None:
            raise InferenceError(f"no adapter {name} is loaded")
        self._retired[adapter] = asyncio.get_running_loop().create_future()
        return self._retired[adapter]

    def release_unused(self, in_use: Collection[Adapter | None]) -> None:
        """Release retired adapters that are not in use any more."""
        for adapter in self._retired.keys() - set(in_use):
            retired = self._retired.pop(adapter)
            if not retired.done():
                retired.set_result(None)

    @property
    def has_retired(self) -> bool:
        """Whether `release_unused` has anything to do."""
        return bool(self._retired)


class AdapterLayers:
    """Adds the adapters' contributions to the outputs of a model's linear layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._hooked: set[str] = set()
        self._parts: list[tuple[Adapter, torch.Tensor | None]] = []

    def choose(self, adapters: Sequence[Adapter | None]) -> None:
        """Set the adapter of each token in the next forward pass; None means the model alone."""
        distinct = {id(adapter): adapter for adapter in adapters}
        if len(distinct) == 1:
            (only,) = distinct.values()
            self._parts = [] if only is None else [(only, None)]
        else:
            self._parts = [
                (adapter, torch.tensor([i for i, a in enumerate(adapters) if a is adapter]))
                for adapter in distinct.values()
                if adapter is not None
            ]
        for adapter, _ in self._parts:
            self._hook(adapter.layers.keys() - self._hooked)

    def _hook(self, names: set[str]) -> None:
        for name in names:
            module = self._model.get_submodule(name)
            module.register_forward_hook(partial(self._add, name))
        self._hooked |= names

    def _add(
        self, name: str, _: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor
    ) -> torch.Tensor:
        """Return a layer's output [1, N, O] with the adapters' contributions."""
        for adapter, tokens in self._parts:
            weights = adapter.layers.get(name)
            if weights is None:
                continue
            a, b = weights
            if tokens is None:
                output = output + inputs[0] @ a @ b
            else:
                output = output.index_add(1, tokens, inputs[0][:, tokens] @ a @ b)
        return output
