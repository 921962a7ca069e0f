"""Delivers weights from the trainer's memory: what the ways that need no files share.

All servers are paused, receive the trainer's weights bucket by bucket while the next bucket is
gathered, and continue together. Until the last bucket arrives, a server holds weights of two
versions: it carries a label that no policy has, and a server that is taken out at that point stays
paused until it has complete weights again.
"""

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.config.sections import PublishSection
from agentrl.distributed.broadcast import Bucket
from agentrl.errors import InferenceError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync.delivery import OnOutcome
from agentrl.inference.weight_sync.server_operations import abort_paused, open_broadcast
from agentrl.models.checkpoints.checkpoint_layout import checkpoint_tensors
from agentrl.schema import Policy

logger = logging.getLogger(__name__)

SendWeights = Callable[[int, Callable[[Bucket], None]], Awaitable[None]]
"""Calls a function, in another thread, with the model's parameters in buckets of at most the given
bytes. The tensors may share memory with the trained parameters, which do not change before the
delivery is over.
"""


@dataclass
class DeliveryRound:
    """One attempt to bring servers to a version together."""

    policy: Policy
    servers: dict[str, SGLangClient]
    """The servers that still take part."""
    end: float
    """Deadline on the monotonic clock."""
    lost: dict[str, InferenceError] = field(default_factory=dict)
    """The servers that were dropped, with the reason."""
    takes_stacks: bool = False
    """Whether every server takes the experts of a layer as one tensor, as the model holds them. SGLang
    takes one tensor per expert, and a broadcast of a small tensor costs far more than its bytes."""

    @property
    def seconds_left(self) -> float:
        """Remaining time; never 0, which some callees read as no timeout."""
        return max(self.end - time.monotonic(), 0.001)

    def drop(self, name: str, error: InferenceError) -> None:
        """Take a server out of the round."""
        del self.servers[name]
        self.lost[name] = error

    async def each(
        self,
        operation: Callable[[str, SGLangClient], Awaitable[None]],
        seconds: float | None = None,
    ) -> bool:
        """Run an operation on all servers concurrently; drop those that fail or time out.

        Args:
            operation: called with the id of a server and its client.
            seconds: timeout; all remaining time by default.
        """
        bound = seconds or self.seconds_left

        async def run(name: str, client: SGLangClient) -> None:
            try:
                async with asyncio.timeout(bound):
                    await operation(name, client)
            except InferenceError as error:
                self.drop(name, error)
            except TimeoutError:
                self.drop(
                    name, InferenceError(f"{client.base_url} timed out while loading new weights")
                )

        count = len(self.servers)
        await asyncio.gather(*(run(*server) for server in list(self.servers.items())))
        return len(self.servers) == count


class MemoryDelivery(ABC):
    """Servers receive the weights from the trainer's memory, together."""

    needs_files = False
    num_rounds = 1
    """How often the servers that remain receive everything again; all rounds have the same time."""

    def __init__(self, publish: PublishSection, send: SendWeights) -> None:
        """Prepare without sending anything."""
        self._publish = publish
        self._send = send
        self.phases: dict[str, float] = {}
        """Seconds that the last delivery spent in each of its phases, summed over its rounds.
        `gather` counts only the time spent waiting for weights.
        """
        self._paused_at: dict[str, float] = {}

    async def deliver(
        self, policy: Policy, servers: Mapping[str, SGLangClient], on_outcome: OnOutcome
    ) -> None:
        """See `Delivery.deliver`."""
        seconds = self._publish.publish_timeout_seconds
        started = time.monotonic()
        self.phases = defaultdict(float)
        self._paused_at = {}
        remaining = dict(servers)
        async with asyncio.TaskGroup() as cleanups:

            async def take_out(name: str, error: InferenceError) -> None:
                await on_outcome(name, error)
                if name in self._paused_at:
                    cleanups.create_task(abort_paused(servers[name]))

            for number in range(1, self.num_rounds + 1):
                end = started + seconds * number / self.num_rounds
                round_ = DeliveryRound(policy, remaining, end)
                is_done = bool(remaining) and await self._run_round(round_)
                for name, error in round_.lost.items():
                    await take_out(name, error)
                remaining = round_.servers
                if is_done:
                    break
            else:
                for name, client in remaining.items():
                    await take_out(
                        name, InferenceError(f"{client.base_url}: two broadcasts failed")
                    )
                return
            ended = time.monotonic()
            for name in remaining:
                await on_outcome(name, ended - self._paused_at[name])
        durations = ", ".join(f"{phase} {value:.3f} s" for phase, value in self.phases.items())
        logger.info(
            "version %d was delivered to %d servers: %s", policy.version, len(remaining), durations
        )

    @abstractmethod
    async def _run_round(self, round_: DeliveryRound) -> bool:
        """Deliver to all servers of a round; False if they have to receive everything again."""

    async def _open(self, round_: DeliveryRound) -> bool:
        """Pause the servers of a round; False if some were dropped."""

        async def open_one(name: str, client: SGLangClient) -> None:
            self._paused_at.setdefault(name, time.monotonic())
            await open_broadcast(client, self._publish.publish_mode)

        with self._phase("open"):
            return await round_.each(open_one)

    async def _buckets(
        self, round_: DeliveryRound, *, on_cpu: bool = False
    ) -> AsyncGenerator[Bucket]:
        """Yield the weights in the form that the servers of a round take."""
        bucket_bytes = self._publish.weight_sync_bucket_mb << 20
        async with aclosing(gathered_buckets(self._send, bucket_bytes, on_cpu=on_cpu)) as buckets:
            while True:
                with self._phase("gather"):
                    bucket = await anext(buckets, None)
                if bucket is None:
                    return
                yield bucket if round_.takes_stacks else in_checkpoint(bucket)

    def _labels(self, policy: Policy, bucket: Bucket) -> dict[str, Any]:
        """Return what a server is told with a bucket: the last one makes its weights a version."""
        return {
            "weight_version": str(policy.version) if bucket.is_last else None,
            "flush_cache": bucket.is_last and self._publish.publish_mode != "in_place",
        }

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] += time.monotonic() - started


def in_checkpoint(bucket: Bucket) -> Bucket:
    """Return a bucket's parameters as tensors of a checkpoint, which are views of them."""
    views = (view for entry in bucket.named for view in checkpoint_tensors(*entry))
    return replace(bucket, named=tuple(views))


async def gathered_buckets(
    send: SendWeights, bucket_bytes: int, *, on_cpu: bool
) -> AsyncGenerator[Bucket]:
    """Yield the weights while they are gathered; at most one bucket waits while another is used.

    A consumer that stops early releases the gathering thread, which then discards the rest.

    Args:
        send: gathers the weights, in another thread.
        bucket_bytes: largest bucket, unless one group of tensors is larger.
        on_cpu: copy the buckets to host memory, in the gathering thread.
    """
    loop = asyncio.get_running_loop()
    buckets: asyncio.Queue[Bucket | None] = asyncio.Queue()
    free_slot = threading.Semaphore(1)
    is_closed = threading.Event()

    def put(bucket: Bucket) -> None:
        ready = bucket.on_cpu() if on_cpu else bucket
        while not is_closed.is_set():
            if free_slot.acquire(timeout=1):
                loop.call_soon_threadsafe(buckets.put_nowait, ready)
                return

    async def produce() -> None:
        try:
            await send(bucket_bytes, put)
        finally:
            buckets.put_nowait(None)

    producing = asyncio.create_task(produce())
    try:
        while (bucket := await buckets.get()) is not None:
            free_slot.release()
            yield bucket
    finally:
        is_closed.set()
    await producing
