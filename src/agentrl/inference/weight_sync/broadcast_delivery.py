"""Broadcasts weights from the trainer's memory to all servers over a process group.

A group lives for one round, so servers that came, went or restarted need no special handling. If a
server fails or hangs midway, the group is abandoned, and the remaining servers receive everything
again over a new one; each of the two rounds has half of the time. Until the last bucket arrives, a
server holds weights of two versions: it carries a label that no policy has, and a server that is
taken out at that point stays paused until it has complete weights again.

    form ── open ──┬─ gather ─┬─ send ── install ──┬── close
                   └──────────┘ next bucket gathered meanwhile
"""

import asyncio
import logging
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace

from agentrl.config.sections import PublishSection
from agentrl.distributed.broadcast import BackendName, BroadcastGroup, Bucket, Rendezvous
from agentrl.errors import BroadcastError, InferenceError, ServerRefused
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync.delivery import OnOutcome
from agentrl.inference.weight_sync.server_operations import (
    abandon_group,
    abort_paused,
    close_broadcast,
    open_broadcast,
)
from agentrl.models.checkpoints.checkpoint_layout import checkpoint_tensors
from agentrl.schema import Policy

logger = logging.getLogger(__name__)

SendWeights = Callable[[int, Callable[[Bucket], None]], Awaitable[None]]
"""Calls a function, in another thread, with the model's parameters in buckets of at most the given
bytes. The tensors may share memory with the trained parameters, which do not change before the
delivery is over.
"""

_NUM_ROUNDS = 2
_NOTICE_SHARE = 0.1
"""Share of the timeout in which servers must notice that a group was abandoned."""
# Part of SGLang's message for weights that did not arrive. The server itself is healthy.
_NOT_RECEIVED = "failed to receive weights"


@dataclass
class BroadcastRound:
    """One attempt to bring servers to a version together."""

    servers: dict[str, SGLangClient]
    """The servers that still take part."""
    end: float
    """Deadline on the monotonic clock."""
    lost: dict[str, InferenceError] = field(default_factory=dict)
    """The servers that were dropped, with the reason."""
    takes_stacks: bool = True
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


class BroadcastDelivery:
    """All servers receive the weights in lockstep, as they are broadcast."""

    needs_files = False

    def __init__(self, publish: PublishSection, send: SendWeights, backend: BackendName) -> None:
        """Prepare without sending anything."""
        self._publish = publish
        self._send = send
        self._backend: BackendName = backend
        self.phases: dict[str, float] = {}
        """Seconds that the last delivery spent in each of its phases, summed over its rounds.
        `gather` counts only the time spent waiting for weights.
        """

    async def deliver(
        self, policy: Policy, servers: Mapping[str, SGLangClient], on_outcome: OnOutcome
    ) -> None:
        """See `Delivery.deliver`."""
        seconds = self._publish.publish_timeout_seconds
        started = time.monotonic()
        self.phases = defaultdict(float)
        remaining = dict(servers)
        paused_at: dict[str, float] = {}
        async with asyncio.TaskGroup() as cleanups:

            async def take_out(name: str, error: InferenceError) -> None:
                await on_outcome(name, error)
                if name in paused_at:
                    cleanups.create_task(abort_paused(servers[name]))

            for number in range(1, _NUM_ROUNDS + 1):
                round_ = BroadcastRound(remaining, started + seconds * number / _NUM_ROUNDS)
                is_done = bool(remaining) and await self._run_round(policy, round_, paused_at)
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
                await on_outcome(name, ended - paused_at[name])
        durations = ", ".join(f"{phase} {value:.3f} s" for phase, value in self.phases.items())
        logger.info(
            "version %d was broadcast to %d servers: %s", policy.version, len(remaining), durations
        )

    async def _run_round(
        self, policy: Policy, round_: BroadcastRound, paused_at: dict[str, float]
    ) -> bool:
        """Deliver to all servers of a round; False if some were dropped or the group failed."""
        name = uuid.uuid4().hex
        with self._phase("form"):
            group = await self._form_group(round_, name)
        if group is None:
            return False

        async def open_one(server: str, client: SGLangClient) -> None:
            paused_at.setdefault(server, time.monotonic())
            await open_broadcast(client, self._publish.publish_mode)

        try:
            with self._phase("open"):
                are_all_open = await round_.each(open_one)
            is_sent = are_all_open and await self._send_all(policy, round_, group, name)
        finally:
            group.leave()
        if not is_sent:
            await asyncio.gather(
                *(abandon_group(client, name) for client in round_.servers.values())
            )
            return False
        with self._phase("close"):
            await round_.each(lambda _, client: close_broadcast(client, name))
        return True

    async def _form_group(self, round_: BroadcastRound, name: str) -> BroadcastGroup | None:
        """Form a group with all servers of a round; None if that failed."""
        sizes: dict[str, int] = {}

        async def read_size(server: str, client: SGLangClient) -> None:
            info = await client.server_info()
            sizes[server] = _num_ranks(client, info)
            round_.takes_stacks &= info.get("frontend") == "agentrl"

        # Detect a hanging server here, before others wait for it in the group.
        await round_.each(read_size, round_.seconds_left / 2)
        if not round_.servers:
            return None
        offsets: dict[str, int] = {}
        world_size = 1  # the sender's rank is 0
        for server in round_.servers:
            offsets[server] = world_size
            world_size += sizes[server]
        rendezvous = Rendezvous(self._publish.weight_sync_host, world_size, round_.seconds_left / 2)

        async def invite(server: str, client: SGLangClient) -> None:
            await client.init_weights_update_group(
                host=rendezvous.host,
                port=rendezvous.port,
                rank_offset=offsets[server],
                world_size=world_size,
                name=name,
                backend=self._backend,
            )

        inviting = asyncio.create_task(round_.each(invite))
        try:
            group = await rendezvous.form_group(name, self._backend)
        except BroadcastError:
            group = None
        have_all_joined = await inviting
        if group is not None and not have_all_joined:
            group.leave()
            return None
        return group

    async def _send_all(
        self, policy: Policy, round_: BroadcastRound, group: BroadcastGroup, name: str
    ) -> bool:
        """Broadcast all buckets; the next one is gathered while one is in flight."""
        is_sent = True
        bucket_bytes = self._publish.weight_sync_bucket_mb << 20
        gathering = gathered_buckets(self._send, bucket_bytes, on_cpu=self._backend == "gloo")
        async with aclosing(gathering) as buckets:
            while True:
                with self._phase("gather"):
                    bucket = await anext(buckets, None)
                if bucket is None:
                    return is_sent
                # All ranks of the trainer gather together, so the remaining buckets must be
                # gathered even if the broadcast has failed.
                if is_sent:
                    is_sent = await self._send_one(policy, bucket, round_, group, name)

    async def _send_one(
        self,
        policy: Policy,
        bucket: Bucket,
        round_: BroadcastRound,
        group: BroadcastGroup,
        name: str,
    ) -> bool:
        """Broadcast one bucket; on failure leave the group and return False."""
        bucket = bucket if round_.takes_stacks else in_checkpoint(bucket)
        installing = {
            server: asyncio.create_task(
                client.update_weights_from_distributed(
                    bucket,
                    group=name,
                    weight_version=str(policy.version) if bucket.is_last else None,
                    flush_cache=bucket.is_last and self._publish.publish_mode != "in_place",
                )
            )
            for server, client in round_.servers.items()
        }
        sending = asyncio.create_task(group.broadcast(bucket.tensors, round_.seconds_left))
        started = sent = time.monotonic()

        def note_sent(_: object) -> None:
            nonlocal sent
            sent = time.monotonic()

        sending.add_done_callback(note_sent)
        in_flight = {sending, *installing.values()}
        _, unfinished = await asyncio.wait(
            in_flight, timeout=round_.seconds_left, return_when=asyncio.FIRST_EXCEPTION
        )
        self.phases["send"] += sent - started
        self.phases["install"] += time.monotonic() - sent
        if not unfinished and all(task.exception() is None for task in in_flight):
            return True
        group.leave()
        await asyncio.wait(in_flight, timeout=_NOTICE_SHARE * self._publish.publish_timeout_seconds)
        for server, task in installing.items():
            url = round_.servers[server].base_url
            if not task.done():
                round_.drop(
                    server, InferenceError(f"{url} did not respond while it received weights")
                )
            elif isinstance(error := task.exception(), InferenceError) and not _is_group_failure(
                error
            ):
                round_.drop(server, error)
            task.cancel()
        sending.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)
        return False

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


def _is_group_failure(error: InferenceError) -> bool:
    """Return whether a server reports a failure of the group, which it did not cause."""
    return isinstance(error, ServerRefused) and _NOT_RECEIVED in str(error).lower()


def _num_ranks(client: SGLangClient, info: Mapping[str, object]) -> int:
    for key, flag in (("dp_size", "--dp-size"), ("pp_size", "--pp-size")):
        if info.get(key, 1) != 1:
            raise InferenceError(
                f"{client.base_url} runs with {flag} {info[key]}, which does not support "
                "broadcast weights; use --weight_sync disk"
            )
    return int(str(info.get("tp_size", 1)))
