"""Broadcasts weights from the trainer's memory to all servers over a process group.

A group lives for one round, so servers that came, went or restarted need no special handling. If a
server fails or hangs midway, the group is abandoned, and the remaining servers receive everything
again over a new one; each of the two rounds has half of the time.

    form ── open ──┬─ gather ─┬─ send ── install ──┬── close
                   └──────────┘ next bucket gathered meanwhile
"""

import asyncio
import time
import uuid
from collections.abc import Mapping
from contextlib import aclosing

from agentrl.config.sections import PublishSection
from agentrl.distributed.broadcast import BackendName, BroadcastGroup, Bucket, Rendezvous
from agentrl.errors import BroadcastError, InferenceError, ServerRefused
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync.memory_delivery import DeliveryRound, MemoryDelivery, SendWeights
from agentrl.inference.weight_sync.server_operations import abandon_group, close_broadcast

_NOTICE_SHARE = 0.1
"""Share of the timeout in which servers must notice that a group was abandoned."""
# Part of SGLang's message for weights that did not arrive. The server itself is healthy.
_NOT_RECEIVED = "failed to receive weights"


class BroadcastDelivery(MemoryDelivery):
    """All servers receive the weights in lockstep, as they are broadcast."""

    num_rounds = 2

    def __init__(self, publish: PublishSection, send: SendWeights, backend: BackendName) -> None:
        """Prepare without sending anything."""
        super().__init__(publish, send)
        self._backend: BackendName = backend

    async def _run_round(self, round_: DeliveryRound) -> bool:
        """Deliver to all servers of a round; False if some were dropped or the group failed."""
        name = uuid.uuid4().hex
        with self._phase("form"):
            group = await self._form_group(round_, name)
        if group is None:
            return False
        try:
            is_sent = await self._open(round_) and await self._send_all(round_, group, name)
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

    async def _form_group(self, round_: DeliveryRound, name: str) -> BroadcastGroup | None:
        """Form a group with all servers of a round; None if that failed."""
        sizes: dict[str, int] = {}

        async def read_size(server: str, client: SGLangClient) -> None:
            info = await client.server_info()
            sizes[server] = _num_ranks(client, info)
            round_.takes_stacks &= info.get("frontend") == "agentrl"

        round_.takes_stacks = True
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

    async def _send_all(self, round_: DeliveryRound, group: BroadcastGroup, name: str) -> bool:
        """Broadcast all buckets; the next one is gathered while one is in flight."""
        is_sent = True
        async with aclosing(self._buckets(round_, on_cpu=self._backend == "gloo")) as buckets:
            async for bucket in buckets:
                # All ranks of the trainer gather together, so the remaining buckets must be
                # gathered even if the broadcast has failed.
                if is_sent:
                    is_sent = await self._send_one(bucket, round_, group, name)
        return is_sent

    async def _send_one(
        self, bucket: Bucket, round_: DeliveryRound, group: BroadcastGroup, name: str
    ) -> bool:
        """Broadcast one bucket; on failure leave the group and return False."""
        labels = self._labels(round_.policy, bucket)
        installing = {
            server: asyncio.create_task(
                client.update_weights_from_distributed(bucket, group=name, **labels)
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
