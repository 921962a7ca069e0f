"""Weights straight from the trainer's memory to all servers, over a process group.

A group lives for one publication, so a server that came, went or restarted needs no care. Where a
server fails or hangs in the middle, the group is given up and those that are left get everything
again over a new one; each of the two attempts has half of the bound. Until the last bucket is in, a
server's weights are of two versions: it carries a label that no policy has, and one that is taken
out then is not continued before it has whole weights again.

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

from agentrl.config.sections import PublishSection
from agentrl.distributed.broadcast import BackendName, BroadcastGroup, Rendezvous
from agentrl.distributed.buckets import Bucket
from agentrl.errors import BroadcastError, InferenceError, ServerRefused
from agentrl.inference.client.http_client import SGLangClient
from agentrl.inference.weight_sync.broadcast_attempt import (
    Attempt,
    close_update,
    give_up_group,
    leave_paused,
    open_update,
)
from agentrl.inference.weight_sync.delivery import Settled
from agentrl.schema import Policy

logger = logging.getLogger(__name__)

SendWeights = Callable[[int, Callable[[Bucket], None]], Awaitable[None]]
"""Calls a function, in another thread, with the weights in buckets of at most so many bytes. They
may be the very memory that is trained: it is not changed before the delivery is over."""

_ATTEMPTS = 2
_GRACE = 0.1
"""Share of the bound in which servers have to notice that a group was given up."""
# SGLang's words for weights that did not come: the server itself is fine.
_NOT_RECEIVED = "failed to receive weights"


class BroadcastDelivery:
    """Every server takes the weights as they are broadcast, all in step."""

    needs_files = False

    def __init__(self, publish: PublishSection, send: SendWeights, backend: BackendName) -> None:
        """Set up.

        Args:
            publish: how servers are updated.
            send: where the weights come from.
            backend: `nccl` where trainer and servers compute on GPUs.
        """
        self._publish = publish
        self._send = send
        self._backend: BackendName = backend
        self.phases: dict[str, float] = {}
        """Seconds that the last delivery spent in each of its phases, those of a second attempt
        included. `gather` is only the wait for weights that were not there yet."""

    async def deliver(
        self, policy: Policy, servers: Mapping[str, SGLangClient], settled: Settled
    ) -> None:
        """See `Delivery.deliver`."""
        seconds = self._publish.publish_timeout_seconds
        started = time.monotonic()
        self.phases = defaultdict(float)
        waiting = dict(servers)
        paused: dict[str, float] = {}
        async with asyncio.TaskGroup() as leaving:

            async def take_out(name: str, error: InferenceError) -> None:
                await settled(name, error)
                if name in paused:
                    leaving.create_task(leave_paused(servers[name]))

            for number in range(1, _ATTEMPTS + 1):
                attempt = Attempt(waiting, started + seconds * number / _ATTEMPTS)
                is_done = bool(waiting) and await self._try(policy, attempt, paused)
                for name, error in attempt.lost.items():
                    await take_out(name, error)
                waiting = attempt.servers
                if is_done:
                    break
            else:
                for name, client in waiting.items():
                    await take_out(
                        name, InferenceError(f"{client.base_url}: two broadcasts failed")
                    )
                return
            ended = time.monotonic()
            for name in waiting:
                await settled(name, ended - paused[name])
        spent = ", ".join(f"{phase} {value:.3f} s" for phase, value in self.phases.items())
        logger.info(
            "version %d was broadcast to %d servers: %s", policy.version, len(waiting), spent
        )

    async def _try(self, policy: Policy, attempt: Attempt, paused: dict[str, float]) -> bool:
        """Deliver to all servers of an attempt; False when some were lost, or the group was."""
        name = uuid.uuid4().hex
        with self._phase("form"):
            group = await self._form(attempt, name)
        if group is None:
            return False

        async def open_one(server: str, client: SGLangClient) -> None:
            paused.setdefault(server, time.monotonic())
            await open_update(client, self._publish.publish_mode)

        try:
            with self._phase("open"):
                is_fine = await attempt.each(open_one)
            is_sent = is_fine and await self._send_all(policy, attempt, group, name)
        finally:
            group.leave()
        if not is_sent:
            await asyncio.gather(*(give_up_group(it, name) for it in attempt.servers.values()))
            return False
        with self._phase("close"):
            await attempt.each(lambda _, client: close_update(client, name))
        return True

    async def _form(self, attempt: Attempt, name: str) -> BroadcastGroup | None:
        """Form a group with all servers of an attempt; None where that failed."""
        sizes: dict[str, int] = {}

        async def ask_size(server: str, client: SGLangClient) -> None:
            sizes[server] = _num_ranks(client, await client.server_info())

        # A server that hangs is known by its silence, before others wait for it in the group.
        await attempt.each(ask_size, attempt.seconds / 2)
        if not attempt.servers:
            return None
        offsets: dict[str, int] = {}
        world_size = 1
        for server in attempt.servers:
            offsets[server] = world_size
            world_size += sizes[server]
        rendezvous = Rendezvous(self._publish.weight_sync_host, world_size, attempt.seconds / 2)

        async def invite(server: str, client: SGLangClient) -> None:
            await client.init_weights_update_group(
                host=rendezvous.host,
                port=rendezvous.port,
                rank_offset=offsets[server],
                world_size=world_size,
                name=name,
                backend=self._backend,
            )

        inviting = asyncio.create_task(attempt.each(invite))
        try:
            group = await rendezvous.lead(name, self._backend)
        except BroadcastError:
            group = None
        is_fine = await inviting
        if group is not None and not is_fine:
            group.leave()
            return None
        return group

    async def _send_all(
        self, policy: Policy, attempt: Attempt, group: BroadcastGroup, name: str
    ) -> bool:
        """Broadcast all buckets; the next is gathered while one is under way."""
        is_fine = True
        async with aclosing(self._gathered()) as buckets:
            async for bucket in buckets:
                # The ranks gather together, so what was begun is gathered to its end.
                if is_fine:
                    is_fine = await self._send_one(policy, bucket, attempt, group, name)
        return is_fine

    async def _gathered(self) -> AsyncGenerator[Bucket]:
        """Yield the weights as they come; at most one bucket waits while one is used."""
        loop = asyncio.get_running_loop()
        buckets: asyncio.Queue[Bucket | None] = asyncio.Queue()
        room = threading.Semaphore(1)
        is_over = threading.Event()

        def put(bucket: Bucket) -> None:
            ready = bucket if self._backend == "nccl" else bucket.on_cpu()
            while not is_over.is_set():
                if room.acquire(timeout=1):
                    loop.call_soon_threadsafe(buckets.put_nowait, ready)
                    return

        async def produce() -> None:
            try:
                await self._send(self._publish.weight_sync_bucket_mb << 20, put)
            finally:
                buckets.put_nowait(None)

        producing = asyncio.create_task(produce())
        try:
            while True:
                with self._phase("gather"):
                    bucket = await buckets.get()
                if bucket is None:
                    break
                room.release()
                yield bucket
        finally:
            is_over.set()
        await producing

    async def _send_one(
        self, policy: Policy, bucket: Bucket, attempt: Attempt, group: BroadcastGroup, name: str
    ) -> bool:
        """Broadcast one bucket; False when that failed, and then the group was left."""
        taking = {
            server: asyncio.create_task(
                client.update_weights_from_distributed(
                    bucket,
                    group=name,
                    weight_version=str(policy.version) if bucket.is_last else None,
                    flush_cache=bucket.is_last and self._publish.publish_mode != "in_place",
                )
            )
            for server, client in attempt.servers.items()
        }
        sending = asyncio.create_task(group.broadcast(bucket.tensors, attempt.seconds))
        started = sent = time.monotonic()

        def note(_: object) -> None:
            nonlocal sent
            sent = time.monotonic()

        sending.add_done_callback(note)
        under_way = {sending, *taking.values()}
        _, left = await asyncio.wait(
            under_way, timeout=attempt.seconds, return_when=asyncio.FIRST_EXCEPTION
        )
        self.phases["send"] += sent - started
        self.phases["install"] += time.monotonic() - sent
        if not left and all(task.exception() is None for task in under_way):
            return True
        group.leave()
        await asyncio.wait(under_way, timeout=_GRACE * self._publish.publish_timeout_seconds)
        for server, task in taking.items():
            url = attempt.servers[server].base_url
            if not task.done():
                attempt.lose(server, InferenceError(f"{url} was silent as weights came"))
            elif isinstance(error := task.exception(), InferenceError) and not _is_fine(error):
                attempt.lose(server, error)
            task.cancel()
        sending.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        return False

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] += time.monotonic() - started


def _is_fine(error: InferenceError) -> bool:
    """Whether a server failed for no fault of its own."""
    return isinstance(error, ServerRefused) and _NOT_RECEIVED in str(error).lower()


def _num_ranks(client: SGLangClient, info: Mapping[str, object]) -> int:
    for key, flag in (("dp_size", "--dp-size"), ("pp_size", "--pp-size")):
        if info.get(key, 1) != 1:
            raise InferenceError(
                f"{client.base_url} runs with {flag} {info[key]}, which takes no broadcast weights; "
                "use --weight_sync disk"
            )
    return int(str(info.get("tp_size", 1)))
