"""Weights straight from the trainer's memory to all servers, over a process group.

A group lives for one publication, so a server that came, went or restarted needs no care. Where a
server fails or hangs in the middle, the group is given up and those that are left get everything
again over a new one; each of the two attempts has half of the bound. Until the last bucket is in, a
server's weights are of two versions: it carries a label that no policy has, and one that is taken
out then is not continued before it has whole weights again.
"""

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field

from agentrl.config.sections import PublishSection
from agentrl.distributed.broadcast import BackendName, BroadcastGroup, Bucket, Rendezvous
from agentrl.errors import InferenceError, PublishError
from agentrl.inference.client import SGLangClient
from agentrl.inference.faults import ServerRefused
from agentrl.inference.wire import MIXED_LABEL
from agentrl.schema import Policy
from agentrl.weight_sync.delivery import Settled
from agentrl.weight_sync.update import resume, supported_mode

SendWeights = Callable[[int, Callable[[Bucket], None]], Awaitable[None]]
"""Calls a function, in another thread, with the weights in buckets of at most so many bytes."""

_ATTEMPTS = 2
_GRACE = 0.1
"""Share of the bound in which servers have to notice that a group was given up."""
_LEAVE_SECONDS = 3.0
"""How long is tried to end what a lost server has in flight."""
# SGLang's words for weights that did not come: the server itself is fine.
_NOT_RECEIVED = "failed to receive weights"
_NOT_FOUND = 404


@dataclass
class _Attempt:
    """One try to bring servers to a version."""

    servers: dict[str, SGLangClient]
    """Those that are still in it."""
    end: float
    """When its time is over, on the monotonic clock."""
    lost: dict[str, InferenceError] = field(default_factory=dict)
    """Those that are not, and why."""

    @property
    def seconds(self) -> float:
        """Time that is left."""
        return max(self.end - time.monotonic(), 0.001)

    def lose(self, name: str, error: InferenceError) -> None:
        """Take a server out."""
        del self.servers[name]
        self.lost[name] = error

    async def each(self, operation: Callable[[SGLangClient], Awaitable[None]]) -> None:
        """Do something with every server; those that fail or are too slow are lost."""
        await asyncio.gather(*(self._one(name, operation) for name in list(self.servers)))

    async def _one(self, name: str, operation: Callable[[SGLangClient], Awaitable[None]]) -> None:
        client = self.servers[name]
        try:
            async with asyncio.timeout(self.seconds):
                await operation(client)
        except InferenceError as error:
            self.lose(name, error)
        except TimeoutError:
            self.lose(name, InferenceError(f"{client.base_url} took too long for new weights"))


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

    async def deliver(
        self, policy: Policy, servers: Mapping[str, SGLangClient], settled: Settled
    ) -> None:
        """See `Delivery.deliver`."""
        seconds = self._publish.publish_timeout_seconds
        started = time.monotonic()
        waiting = dict(servers)
        paused: dict[str, float] = {}
        async with asyncio.TaskGroup() as leaving:

            async def take_out(name: str, error: InferenceError) -> None:
                await settled(name, error)
                if name in paused:
                    leaving.create_task(_leave_paused(servers[name]))

            for number in range(1, _ATTEMPTS + 1):
                attempt = _Attempt(waiting, started + seconds * number / _ATTEMPTS)
                is_done = bool(waiting) and await self._try(policy, attempt, paused)
                for name, error in attempt.lost.items():
                    await take_out(name, error)
                if is_done:
                    ended = time.monotonic()
                    for name in attempt.servers:
                        await settled(name, ended - paused[name])
                    return
                waiting = attempt.servers
            for name, client in waiting.items():
                await take_out(name, InferenceError(f"{client.base_url}: two broadcasts failed"))

    async def _try(self, policy: Policy, attempt: _Attempt, paused: dict[str, float]) -> bool:
        """Deliver to all servers of an attempt; False when some were lost, or the group was."""
        name = uuid.uuid4().hex
        group = await self._form(attempt, name)
        if group is None:
            return False
        num_servers = len(attempt.servers)
        try:

            async def open_session(client: SGLangClient) -> None:
                mode = await supported_mode(client, self._publish.publish_mode)
                paused.setdefault(_name_of(client, attempt), time.monotonic())
                await client.pause(mode)
                await _begin(client)

            await attempt.each(open_session)
            if len(attempt.servers) < num_servers:
                return False
            if not await self._send_all(policy, attempt, group, name):
                return False
        finally:
            group.leave()

        async def close_session(client: SGLangClient) -> None:
            await _unless_unknown(client.end_weight_update())
            await client.destroy_weights_update_group(name)
            await resume(client)

        await attempt.each(close_session)
        return True

    async def _form(self, attempt: _Attempt, name: str) -> BroadcastGroup | None:
        """Form a group with all servers of an attempt; None where that failed."""
        ranks: dict[SGLangClient, int] = {}

        # A server that hangs is known by its silence, before others wait for it in the group.
        patience = attempt.seconds / 2

        async def ask_size(client: SGLangClient) -> None:
            async with asyncio.timeout(patience):
                ranks[client] = _num_ranks(client, await client.server_info())

        await attempt.each(ask_size)
        if not attempt.servers:
            return None
        offsets: dict[SGLangClient, int] = {}
        world_size = 1
        for client in attempt.servers.values():
            offsets[client] = world_size
            world_size += ranks[client]
        seconds = attempt.seconds / 2
        rendezvous = Rendezvous(self._publish.weight_sync_host, world_size, seconds)

        async def invite(client: SGLangClient) -> None:
            async with asyncio.timeout(attempt.seconds):
                await client.init_weights_update_group(
                    host=rendezvous.host,
                    port=rendezvous.port,
                    rank_offset=offsets[client],
                    world_size=world_size,
                    name=name,
                    backend=self._backend,
                )

        leading = asyncio.create_task(rendezvous.lead(name, self._backend))
        inviting = asyncio.create_task(attempt.each(invite))
        try:
            group = await leading
        except PublishError:
            group = None
        await inviting
        if group is not None and len(attempt.servers) < len(offsets):
            group.leave()
            return None
        return group

    async def _send_all(
        self, policy: Policy, attempt: _Attempt, group: BroadcastGroup, name: str
    ) -> bool:
        """Broadcast all buckets; one is gathered while another is under way."""
        loop = asyncio.get_running_loop()
        buckets: asyncio.Queue[Bucket | None] = asyncio.Queue(1)
        is_over = threading.Event()

        def put(bucket: Bucket) -> None:
            putting = asyncio.run_coroutine_threadsafe(buckets.put(bucket), loop)
            while not is_over.is_set() and not wait([putting], timeout=1).done:
                pass

        async def produce() -> None:
            try:
                await self._send(self._publish.weight_sync_bucket_mb << 20, put)
            finally:
                await buckets.put(None)

        producing = asyncio.create_task(produce())
        is_fine, is_first = True, True
        try:
            bucket = await buckets.get()
            while bucket is not None:
                following = await buckets.get()
                label = MIXED_LABEL if is_first else None
                if following is None:
                    label = str(policy.version)
                # The ranks gather together, so what was begun is gathered to its end.
                if is_fine:
                    is_fine = await self._send_one(
                        bucket, attempt, group, name, label, is_last=following is None
                    )
                bucket, is_first = following, False
        finally:
            is_over.set()
        await producing
        return is_fine

    async def _send_one(
        self,
        bucket: Bucket,
        attempt: _Attempt,
        group: BroadcastGroup,
        name: str,
        label: str | None,
        *,
        is_last: bool,
    ) -> bool:
        flush = is_last and self._publish.publish_mode != "in_place"
        data = bucket.data if self._backend == "nccl" else bucket.data.cpu()
        taking = {
            server: asyncio.create_task(
                client.update_weights_from_distributed(
                    bucket, group=name, weight_version=label, flush_cache=flush
                )
            )
            for server, client in attempt.servers.items()
        }
        sending = asyncio.create_task(group.broadcast(data, attempt.seconds))
        under_way = {sending, *taking.values()}
        _, left = await asyncio.wait(
            under_way, timeout=attempt.seconds, return_when=asyncio.FIRST_EXCEPTION
        )
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


async def _leave_paused(client: SGLangClient) -> None:
    """End what a server has in flight; nothing is sampled there before it has whole weights."""
    with contextlib.suppress(InferenceError, TimeoutError):
        async with asyncio.timeout(_LEAVE_SECONDS):
            await client.abort()
            await _unless_unknown(client.end_weight_update())


def _is_fine(error: InferenceError) -> bool:
    """Whether a server failed for no fault of its own."""
    return isinstance(error, ServerRefused) and _NOT_RECEIVED in str(error).lower()


async def _begin(client: SGLangClient) -> None:
    try:
        await _unless_unknown(client.begin_weight_update())
    except ServerRefused:
        # Left open by an attempt that failed, or by a trainer that died.
        await client.end_weight_update()
        await client.begin_weight_update()


async def _unless_unknown(call: Awaitable[None]) -> None:
    """Call a route that SGLang has since 0.5.20 or so; those before do without."""
    try:
        await call
    except ServerRefused as error:
        if error.status != _NOT_FOUND:
            raise


def _name_of(client: SGLangClient, attempt: _Attempt) -> str:
    return next(name for name, other in attempt.servers.items() if other is client)


def _num_ranks(client: SGLangClient, info: Mapping[str, object]) -> int:
    for key, flag in (("dp_size", "--dp-size"), ("pp_size", "--pp-size")):
        if info.get(key, 1) != 1:
            raise InferenceError(
                f"{client.base_url} runs with {flag} {info[key]}, which takes no broadcast weights; "
                "use --weight_sync disk"
            )
    return int(str(info.get("tp_size", 1)))
