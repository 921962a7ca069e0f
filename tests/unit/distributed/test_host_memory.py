"""The memory of copies: lent, taken back, and lent again.

What is faked is where a tensor is: it says that it is on a GPU, and its data are in host memory. The
memory of the copies is not page-locked then; `tests/gpu/test_host_memory.py` moves a trainer's state.
"""

import pytest
import torch

from agentrl.distributed import host_memory
from agentrl.distributed.host_memory import HostMemory


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape).to(dtype).as_subclass(OnGpu)


def equal(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    return torch.equal(copy, tensor.as_subclass(torch.Tensor))


@pytest.fixture(params=[64, 4096, 1 << 28], ids=["own", "few", "one"])
def slab_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Sizes at which tensors have allocations of their own, share few, or share one."""
    num_bytes: int = request.param
    monkeypatch.setattr(host_memory, "_SLAB_BYTES", num_bytes)
    return num_bytes


def test_copies_do_not_overlap_and_keep_shape_and_dtype(slab_bytes: int) -> None:
    memory = HostMemory()
    tensors = [on_gpu(n, 3, dtype=torch.bfloat16 if n % 2 else torch.float32) for n in range(1, 60)]
    copies = [memory.copy_of(tensor) for tensor in tensors]
    assert all(map(equal, copies, tensors))
    assert [copy.dtype for copy in copies] == [tensor.dtype for tensor in tensors]
    assert {type(copy) for copy in copies} == {torch.Tensor}


def test_memory_that_was_given_back_is_lent_again_and_other_is_not(slab_bytes: int) -> None:
    memory = HostMemory()
    first, kept = (memory.copy_of(on_gpu(2, 3)) for _ in range(2))
    place, values = first.data_ptr(), kept.clone()
    memory.give_back([first, torch.rand(2, 3)])
    other, again, new = on_gpu(3, 2), on_gpu(2, 3), on_gpu(2, 3)
    assert memory.copy_of(other).data_ptr() != place  # of another shape
    copy = memory.copy_of(again)
    assert copy.data_ptr() == place
    assert equal(copy, again)
    assert memory.copy_of(new).data_ptr() not in (place, kept.data_ptr())
    assert torch.equal(kept, values)


def test_views_with_gaps_and_empty_tensors_are_copied_into_memory_of_their_own() -> None:
    memory = HostMemory()
    for tensor in (on_gpu(4, 6)[:, ::2], on_gpu(0, 3)):
        copy = memory.copy_of(tensor)
        assert equal(copy, tensor)
        memory.give_back([copy])


def test_what_is_in_host_memory_stays_where_it_is() -> None:
    memory, tensor = HostMemory(), torch.rand(5)
    with memory.copies({"weight": tensor}) as copies:
        assert copies["weight"] is tensor
    with memory.copies({"weight": torch.rand(5)}) as copies:
        assert copies["weight"].data_ptr() != tensor.data_ptr()


def test_copies_of_a_version_serve_the_next_one() -> None:
    memory = HostMemory()
    places = []
    for _ in range(2):
        weights = {"a": on_gpu(7), "b": on_gpu(7, 2)}
        with memory.copies(weights) as copies:
            assert all(equal(copies[name], weights[name]) for name in weights)
            places.append({name: copy.data_ptr() for name, copy in copies.items()})
    assert places[0] == places[1]
