"""One sender, many receivers: weights over a process group of their own.

The group is what SGLang forms for `/init_weights_update_group`: a TCP store on the sender's side,
keys prefixed as `torch.distributed` prefixes them, and one backend on top of it. It is no part of
torch's global state, so it stands beside the trainer's own groups and is dropped when a receiver is
lost. Several tensors travel as one flat uint8 bucket, SGLang's `flattened_bucket`.
"""

import asyncio
import math
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Self, TypeVar

import torch
import torch.distributed as torch_distributed

from agentrl.errors import PublishError

# Stores and backends are exported by torch at run time, but not in its type stubs.
dist: Any = torch_distributed

T = TypeVar("T")

BackendName = Literal["gloo", "nccl"]
SENDER = 0
"""Rank of the sender in every group."""


@dataclass(frozen=True)
class Bucket:
    """Named tensors, one after the other as bytes."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Torch's names without `torch.`, as `bfloat16`."""
    shapes: tuple[tuple[int, ...], ...]
    data: torch.Tensor
    """uint8 [bytes of all tensors]."""

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, torch.Tensor]]) -> Self:
        """Copy tensors into a bucket."""
        flat = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in tensors]
        return cls(
            names=tuple(name for name, _ in tensors),
            dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors),
            shapes=tuple(tuple(tensor.shape) for _, tensor in tensors),
            data=torch.cat(flat),
        )

    @classmethod
    def empty(
        cls, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> Self:
        """Make room for tensors in CPU memory.

        Raises:
            PublishError: the description makes no sense.
        """
        if not names or not len(names) == len(dtypes) == len(shapes):
            raise PublishError("names, dtypes and shapes have to be lists of one length above 0")
        num_bytes = 0
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            kind = getattr(torch, dtype, None)
            if not isinstance(kind, torch.dtype) or min(shape, default=0) < 0:
                raise PublishError(f"{name} cannot be {dtype} of shape {list(shape)}")
            if num_bytes % kind.itemsize:
                raise PublishError(f"{name} does not begin at a multiple of {kind.itemsize} bytes")
            num_bytes += math.prod(shape) * kind.itemsize
        return cls(
            names=tuple(names),
            dtypes=tuple(dtypes),
            shapes=tuple(tuple(shape) for shape in shapes),
            data=torch.empty(num_bytes, dtype=torch.uint8),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name; they share the bucket's memory."""
        found: dict[str, torch.Tensor] = {}
        offset = 0
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            kind: torch.dtype = getattr(torch, dtype)
            end = offset + math.prod(shape) * kind.itemsize
            found[name] = self.data[offset:end].view(kind).view(shape)
            offset = end
        return found


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
            yield Bucket.of(waiting)
            waiting, num_bytes = [], 0
        waiting += group
        num_bytes += size
    if waiting:
        yield Bucket.of(waiting)


@dataclass(frozen=True)
class Seat:
    """A receiver's place in a group that is being formed."""

    host: str
    """The sender's address."""
    port: int
    rank: int
    world_size: int


class Rendezvous:
    """Where the receivers of a group find the sender."""

    def __init__(self, host: str, world_size: int, timeout_seconds: float) -> None:
        """Listen on a free port of one address.

        Args:
            host: an address of this machine that the receivers reach.
            world_size: ranks of the group, the sender's included.
            timeout_seconds: bound on forming the group.

        Raises:
            PublishError: the address is not this machine's.
        """
        try:
            # By itself the store would listen on every address of the machine.
            listener = socket.create_server((host, 0))
        except OSError as error:
            raise PublishError(
                f"cannot listen on {host} ({error.strerror or error}); set --weight_sync_host"
            ) from error
        self.host = host
        self.port = int(listener.getsockname()[1])
        self.world_size = world_size
        self._timeout = timedelta(seconds=timeout_seconds)
        self._store = dist.TCPStore(
            host,
            self.port,
            world_size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    async def lead(self, name: str, backend: BackendName) -> "BroadcastGroup":
        """Form the group as its sender; returns when all receivers are there.

        Raises:
            PublishError: they were not there in time.
        """

        def form() -> BroadcastGroup:
            return _form(self._store, name, SENDER, self.world_size, backend, self.host)

        return await _beside(form)


async def take_seat(
    seat: Seat, name: str, backend: BackendName, timeout_seconds: float
) -> "BroadcastGroup":
    """Join a group as a receiver; returns when all others are there.

    Raises:
        PublishError: they were not there in time.
    """

    def join() -> BroadcastGroup:
        store = dist.TCPStore(
            seat.host,
            seat.port,
            seat.world_size,
            is_master=False,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
        )
        return _form(store, name, seat.rank, seat.world_size, backend, _address_towards(seat))

    return await _beside(join)


class BroadcastGroup:
    """A formed group."""

    def __init__(self, backend: Any, store: Any) -> None:
        self._backend = backend
        self._store = store  # the group's life hangs on it

    async def broadcast(self, data: torch.Tensor, timeout_seconds: float) -> None:
        """Send (rank 0) or receive into a uint8 tensor.

        After an error the group is of no use any more. What is under way goes on when the call is
        cancelled, until its time is over.

        Raises:
            PublishError: a peer is gone, or the time is over.
        """
        options = dist.BroadcastOptions()
        options.rootRank = SENDER
        options.timeout = timedelta(seconds=timeout_seconds)
        backend = self._backend

        def run() -> None:
            with torch.cuda.device(data.device) if data.is_cuda else nullcontext():
                backend.broadcast([data], options).wait()
                if data.is_cuda:
                    # NCCL's work is only queued so far.
                    torch.cuda.current_stream().synchronize()

        await _beside(run)

    def leave(self) -> None:
        """Close the connections, as soon as nothing is under way any more; returns at once.

        Leaving twice does no harm.
        """
        if self._backend is None:
            return
        held = [self._backend, self._store]
        self._backend = self._store = None

        def close() -> None:
            held[0].abort()
            held.clear()  # waits for what is under way

        threading.Thread(target=close, name="leave", daemon=True).start()


def _form(
    store: Any, name: str, rank: int, world_size: int, backend: BackendName, address: str
) -> BroadcastGroup:
    # As `_new_process_group_helper` of torch and `init_custom_process_group` of SGLang nest them.
    device = "cuda" if backend == "nccl" else "cpu"
    prefixed: dist.Store = store
    for prefix in (name, f"{name}/", f"{device}/"):
        prefixed = dist.PrefixStore(prefix, prefixed)
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = store.timeout
        return BroadcastGroup(dist.ProcessGroupNCCL(prefixed, rank, world_size, nccl), store)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = store.timeout
    # By itself it would listen on whatever address the machine's name stands for.
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return BroadcastGroup(dist.ProcessGroupGloo(prefixed, rank, world_size, gloo), store)


def _address_towards(seat: Seat) -> str:
    """Return this machine's address on the way to the sender."""
    family, kind, _, _, address = socket.getaddrinfo(seat.host, seat.port, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


async def _beside(operation: Callable[[], T]) -> T:
    """Run a blocking operation of torch in a thread that holds up neither the loop nor the exit.

    Raises:
        PublishError: it failed.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(settled: Callable[[], None]) -> None:
        def unless_cancelled() -> None:
            if not done.done():
                settled()

        with suppress(RuntimeError):  # the loop is closed, and with it whoever waited
            loop.call_soon_threadsafe(unless_cancelled)

    def run() -> None:
        try:
            result = operation()
        except (RuntimeError, OSError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            failure = PublishError(f"the broadcast group failed: {line}")
            settle(lambda: done.set_exception(failure))
        else:
            settle(lambda: done.set_result(result))

    threading.Thread(target=run, name="broadcast", daemon=True).start()
    return await done
