"""LM head and loss need the memory of one chunk, however long the row."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness.trees import tiny_policy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.algorithms.losses import policy_loss, weighted_sum
from agentrl.data.rows import PackedRow
from agentrl.models.policy import target_logprobs

torch.set_num_threads(1)
HIDDEN, VOCABULARY, CHUNK = 4, 640, 2048
NUM_TOKENS = (4096, 65536)
LOGITS_OF_A_CHUNK = 4 * CHUNK * VOCABULARY


class LivingBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, as long as anything holds them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its signature out
        self.peak: int = 0
        self.living: int = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        operation: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        outputs = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return outputs

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._known:
            return

        def freed(_: object) -> None:
            del self._known[address]
            self.living -= size

        self._known[address] = weakref.ref(storage, freed)
        self.living += size
        self.peak = max(self.peak, self.living)


def chain(num_tokens: int) -> PackedRow:
    index = np.arange(num_tokens)
    return PackedRow(
        token_ids=index % VOCABULARY,
        positions=index,
        subtree_ends=np.full(num_tokens, num_tokens),
        sources=index,
        targets=(index * 7) % VOCABULARY,
        temperatures=np.ones(num_tokens, dtype=np.float32),
    )


def peak_bytes(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> int:
    policy = tiny_policy(dtype=torch.float32, vocab_size=VOCABULARY, hidden_size=HIDDEN)
    hidden = torch.randn(num_tokens, HIDDEN, requires_grad=True)
    monkeypatch.setattr(policy, "_hidden_states", lambda *_: hidden)
    behavior, advantages = torch.full((num_tokens,), -7.6), torch.ones(num_tokens)
    with LivingBytes() as memory:
        logprobs = target_logprobs(
            policy, chain(num_tokens), chunk_size=CHUNK, with_entropy=True
        ).logprobs
        losses = policy_loss(logprobs, behavior, advantages)
        weighted_sum(losses, torch.full((num_tokens,), 1 / num_tokens)).backward()
    assert hidden.grad is not None
    peak: int = memory.peak
    return peak


def test_peak_memory_is_flat_from_4k_to_64k_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = (peak_bytes(num_tokens, monkeypatch) for num_tokens in NUM_TOKENS)
    assert short > 2 * LOGITS_OF_A_CHUNK  # the measure sees logits
    # What still grows is the row's own: hidden states, their gradients, a few numbers a target token.
    own = (NUM_TOKENS[1] - NUM_TOKENS[0]) * (4 * 4 * HIDDEN + 128)
    assert long - short <= own
    assert long <= 1.4 * short
    assert long < 0.2 * 4 * NUM_TOKENS[1] * VOCABULARY
