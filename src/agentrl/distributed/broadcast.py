"""Broadcasts weights from one sender to many receivers over a separate process group.

The group is the one that SGLang forms for `/init_weights_update_group`: a TCP store on the sender's
side, keys prefixed as `torch.distributed` prefixes them, and one backend on top. It does not use
torch's global state, so it coexists with the trainer's groups and can be dropped if a receiver is
lost. Tensors are sent from, and received into, their final memory without a copy.
Independent of servers and policies.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as torch_distributed

from agentrl.distributed.dtypes import dtype_name
from agentrl.errors import BroadcastError

# Stores and backends are exported by torch at run time, but not in its type stubs.
dist: Any = torch_distributed

T = TypeVar("T")

BackendName = Literal["gloo", "nccl"]
SENDER = 0
"""Rank of the sender in every group."""
_GLOO_THREADS = 4
"""Concurrent broadcasts. With torch's default of 2, small tensors wait for each other's handshakes:
300 tensors of 2 MB to two processes on two cores took 0.75 s with 2 threads, 0.57 s with 4 or 8."""


@dataclass(frozen=True)
class RankAssignment:
    """A receiver's rank in a group, and the sender's address."""

    host: str
    """The sender's address."""
    port: int
    rank: int
    world_size: int


class Rendezvous:
    """The TCP store through which the receivers of a group find the sender."""

    def __init__(self, host: str, world_size: int, timeout_seconds: float) -> None:
        """Listen on a free port of one address.

        Args:
            host: an address of this machine that the receivers reach.
            world_size: ranks of the group, the sender's included.
            timeout_seconds: timeout for forming the group.
        """
        try:
            # Without a listener, `TCPStore` listens on all of the machine's addresses.
            listener = socket.create_server((host, 0))
        except OSError as error:
            raise BroadcastError(
                f"cannot listen on {host} ({error.strerror or error}); set weight_sync_host (docs/advanced.md)"
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

    async def form_group(self, name: str, backend: BackendName) -> "BroadcastGroup":
        """Form the group as its sender; return when all receivers have joined."""

        def form() -> BroadcastGroup:
            return _form_group(self._store, name, SENDER, self.world_size, backend, self.host)

        return await in_thread(form)


async def join_group(
    assignment: RankAssignment, name: str, backend: BackendName, timeout_seconds: float
) -> "BroadcastGroup":
    """Join a group as a receiver; return when all others have joined."""

    def join() -> BroadcastGroup:
        store = dist.TCPStore(
            assignment.host,
            assignment.port,
            assignment.world_size,
            is_master=False,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
        )
        return _form_group(
            store,
            name,
            assignment.rank,
            assignment.world_size,
            backend,
            _address_facing(assignment),
        )

    return await in_thread(join)


class BroadcastGroup:
    """A formed process group: rank 0 sends, all others receive."""

    def __init__(self, backend: Any, store: Any) -> None:
        self._backend = backend
        self._store = store  # the group needs it for as long as it exists

    async def broadcast(
        self,
        tensors: Sequence[torch.Tensor],
        timeout_seconds: float,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        """Send (rank 0) or receive into contiguous tensors, in order.

        The group is unusable after an error. Cancelling the call does not stop broadcasts in flight;
        they end with their timeout.

        Args:
            tensors: of any shape and dtype, but the same on all ranks; all on the CPU or all on one
                GPU. They travel as flat bytes, uint8 [nbytes].
            timeout_seconds: timeout for each tensor.
            arrived: called with the index of each complete tensor, in order, in another thread, and
                with gloo while later tensors are in flight.
        """
        options = dist.BroadcastOptions()
        options.rootRank = SENDER
        options.timeout = timedelta(seconds=timeout_seconds)
        backend = self._backend
        if backend is None:
            raise BroadcastError("the broadcast group was left")
        flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
        is_cuda = flat[0].is_cuda

        def run() -> None:
            with torch.cuda.device(flat[0].device) if is_cuda else nullcontext():
                in_flight = [backend.broadcast([data], options) for data in flat]
                for number, work in enumerate(in_flight):
                    work.wait()
                    if arrived is not None:
                        arrived(number)
                if is_cuda:
                    # NCCL's `wait` only orders work on the stream. Wait for the work itself.
                    torch.cuda.current_stream().synchronize()

        await in_thread(run)

    def leave(self) -> None:
        """Leave the group without blocking; connections close when nothing is in flight any more.

        May be called repeatedly.
        """
        if self._backend is None:
            return
        resources = [self._backend, self._store]
        self._backend = self._store = None

        def close() -> None:
            resources[0].abort()
            resources.clear()  # the backend's destructor waits for broadcasts in flight

        threading.Thread(target=close, name="leave", daemon=True).start()


def _form_group(
    store: Any, name: str, rank: int, world_size: int, backend: BackendName, address: str
) -> BroadcastGroup:
    # Prefixes nest as in torch's `_new_process_group_helper` and SGLang's
    # `init_custom_process_group`.
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
    gloo._threads = _GLOO_THREADS
    # By default, gloo listens on the address of the host name, which may be in another network.
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return BroadcastGroup(dist.ProcessGroupGloo(prefixed, rank, world_size, gloo), store)


def _address_facing(assignment: RankAssignment) -> str:
    """Return this machine's address on the route to the sender."""
    family, kind, _, _, address = socket.getaddrinfo(
        assignment.host, assignment.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # for a datagram socket, this selects a route and sends nothing
        return str(probe.getsockname()[0])


async def in_thread(operation: Callable[[], T]) -> T:
    """Run a blocking torch operation in a daemon thread.

    An executor's thread would be joined at exit and could block it until the operation's timeout.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # torch cannot be stopped if the caller is cancelled

    def run() -> None:
        try:
            done.set_result(operation())
        except Exception as error:  # noqa: BLE001
            # Whatever torch raises: the caller waits for this thread.
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            done.set_exception(BroadcastError(f"the broadcast group failed: {line}"))

    threading.Thread(target=run, name="broadcast", daemon=True).start()
    return await asyncio.wrap_future(done)


@dataclass(frozen=True)
class Bucket:
    """Named tensors that are announced together and broadcast one by one, without copies."""

    named: tuple[tuple[str, torch.Tensor], ...]
    """Names, and contiguous tensors of any dtype and shape."""
    is_last: bool = False
    """Whether it completes the weights."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(name for name, _ in self.named)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors, in the order of `names`."""
        return tuple(tensor for _, tensor in self.named)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Names of the dtypes without `torch.`, such as `bfloat16`."""
        return tuple(dtype_name(tensor.dtype) for tensor in self.tensors)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors, in the order of `names`."""
        return tuple(tuple(tensor.shape) for tensor in self.tensors)

    def on_cpu(self) -> "Bucket":
        """Return the bucket in host memory; tensors already there are not copied."""
        return replace(self, named=tuple((name, tensor.cpu()) for name, tensor in self.named))


def in_buckets(
    groups: Iterable[Sequence[tuple[str, torch.Tensor]]], max_bytes: int
) -> Iterator[Bucket]:
    """Yield buckets of at most `max_bytes`, in order.

    Tensors of one group stay together; a larger group becomes one bucket.
    """
    bucket: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for group in groups:
        size = sum(tensor.nbytes for _, tensor in group)
        if bucket and num_bytes + size > max_bytes:
            yield Bucket(tuple(bucket))
            bucket, num_bytes = [], 0
        bucket += ((name, tensor.contiguous()) for name, tensor in group)
        num_bytes += size
    if bucket:
        yield Bucket(tuple(bucket), is_last=True)
