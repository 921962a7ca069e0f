"""Weights in parts: named tensors that are announced together and broadcast one by one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Bucket:
    """One part. Its tensors are whoever's they were: nothing is copied."""

    named: tuple[tuple[str, torch.Tensor], ...]
    """Names in the checkpoint and contiguous tensors of any dtype and shape."""
    is_last: bool = False
    """Whether all weights are sent with it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(name for name, _ in self.named)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors."""
        return tuple(tensor for _, tensor in self.named)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Torch's names without `torch.`, as `bfloat16`."""
        return tuple(str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors."""
        return tuple(tuple(tensor.shape) for tensor in self.tensors)

    def on_cpu(self) -> "Bucket":
        """Return the same in CPU memory; itself where it is there."""
        return replace(self, named=tuple((name, tensor.cpu()) for name, tensor in self.named))


def in_buckets(
    groups: Iterable[Sequence[tuple[str, torch.Tensor]]], max_bytes: int
) -> Iterator[Bucket]:
    """Put tensors into buckets of at most so many bytes.

    Tensors of one group stay together; a larger group is alone in its bucket.
    """
    waiting: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for group in groups:
        size = sum(tensor.nbytes for _, tensor in group)
        if waiting and num_bytes + size > max_bytes:
            yield Bucket(tuple(waiting))
            waiting, num_bytes = [], 0
        waiting += ((name, tensor.contiguous()) for name, tensor in group)
        num_bytes += size
    if waiting:
        yield Bucket(tuple(waiting), is_last=True)
