"""One sender, many receivers: weights over a process group of their own.

The group is what SGLang forms for `/init_weights_update_group`: a TCP store on the sender's side,
keys prefixed as `torch.distributed` prefixes them, and one backend on top of it. It is no part of
torch's global state, so it stands beside the trainer's own groups and is dropped when a receiver is
lost. Tensors travel from where they are to where they belong, without a copy on either side.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as torch_distributed

from agentrl.errors import BroadcastError

# Stores and backends are exported by torch at run time, but not in its type stubs.
dist: Any = torch_distributed

T = TypeVar("T")

BackendName = Literal["gloo", "nccl"]
SENDER = 0
"""Rank of the sender in every group."""
_GLOO_THREADS = 4
"""Broadcasts under way at a time. With torch's own 2, tensors of a few megabytes wait for each other's
handshakes: 300 of 2 MB to two processes on two cores took 0.75 s with 2, 0.57 s with 4 or 8."""


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
            BroadcastError: the address is not this machine's.
        """
        try:
            # By itself the store would listen on every address of the machine.
            listener = socket.create_server((host, 0))
        except OSError as error:
            raise BroadcastError(
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
            BroadcastError: they were not there in time.
        """

        def form() -> BroadcastGroup:
            return _form(self._store, name, SENDER, self.world_size, backend, self.host)

        return await _beside(form)


async def take_seat(
    seat: Seat, name: str, backend: BackendName, timeout_seconds: float
) -> "BroadcastGroup":
    """Join a group as a receiver; returns when all others are there.

    Raises:
        BroadcastError: they were not there in time.
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

    async def broadcast(
        self,
        tensors: Sequence[torch.Tensor],
        timeout_seconds: float,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        """Send (rank 0) or receive into contiguous tensors, in order.

        After an error the group is of no use any more. What is under way goes on when the call is
        cancelled, until its time is over.

        Args:
            tensors: all on the CPU or all on one GPU; shapes and dtypes are the same on all ranks.
            timeout_seconds: bound on each of them.
            arrived: called with the index of every tensor that is through, in order and in another
                thread, while those behind it are under way (gloo).

        Raises:
            BroadcastError: a peer is gone, or the time is over.
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
                under_way = [backend.broadcast([data], options) for data in flat]
                for number, work in enumerate(under_way):
                    work.wait()
                    if arrived is not None:
                        arrived(number)
                if is_cuda:
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
    gloo._threads = _GLOO_THREADS
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
        BroadcastError: it failed.
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
            failure = BroadcastError(f"the broadcast group failed: {line}")
            settle(lambda: done.set_exception(failure))
        else:
            settle(lambda: done.set_result(result))

    threading.Thread(target=run, name="broadcast", daemon=True).start()
    return await done
