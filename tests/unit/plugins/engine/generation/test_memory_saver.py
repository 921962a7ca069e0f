"""Memory that is given back is really given back, and comes back in the same shapes."""

import pytest
import torch
from transformers import PreTrainedModel

from agentrl.errors import InferenceError
from agentrl.plugins.engine.generation.kv_cache import (
    KVCache,
    KVShape,
    PrefixStore,
    RowLimits,
)
from agentrl.plugins.engine.generation.memory_saver import MemorySaver
from agentrl.plugins.engine.weights.live_weights import read_weights, swap_weights

SHAPE = KVShape(num_layers=2, num_heads=2, head_dim=16, dtype=torch.float32)


def parts(model: PreTrainedModel) -> tuple[MemorySaver, KVCache]:
    kv = KVCache(SHAPE, RowLimits(num_rows=8, length=512, num_tokens=1 << 15))
    return MemorySaver(model, kv, PrefixStore(SHAPE, 1 << 22), lambda: None), kv


def weight_bytes(model: PreTrainedModel) -> int:
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def test_nothing_is_left_of_weights_and_cache(model: PreTrainedModel) -> None:
    memory, kv = parts(model)
    assert weight_bytes(model) > 0 < kv.tensor.untyped_storage().nbytes()
    memory.release([])
    assert (weight_bytes(model), kv.tensor.untyped_storage().nbytes()) == (0, 0)
    assert not memory.is_whole


def test_weights_are_whole_once_every_one_of_them_has_a_value(
    model: PreTrainedModel, checkpoint: object
) -> None:
    memory, kv = parts(model)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    tensors = read_weights(str(checkpoint), model)
    memory.release(["weights", "kv_cache"])
    memory.resume(["weights"])
    assert [tuple(parameter.shape) for parameter in model.parameters()] == shapes
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied weights stay tied
    memory.resume(["kv_cache"])
    assert kv.ensure(3, 100)
    names = sorted(tensors)
    memory.note_loaded(swap_weights(model, {name: tensors[name] for name in names[:-1]}))
    assert not memory.is_whole
    memory.note_loaded(swap_weights(model, {names[-1]: tensors[names[-1]]}))
    assert memory.is_whole


def test_what_was_not_released_is_not_resumed(model: PreTrainedModel) -> None:
    memory, _ = parts(model)
    memory.release(["kv_cache"])
    memory.check_weights()
    with pytest.raises(InferenceError, match="cuda_graph, weights was not released"):
        memory.resume([])
    assert not memory.is_whole
    memory.resume(["kv_cache"])
    assert memory.is_whole
