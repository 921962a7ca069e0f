"""Delivers handles of the trainer's tensors; a server on the trainer's GPU copies the weights itself.

    trainer   gather a bucket ── handles ──HTTP──┐          next bucket
    server    pause ───────────────── map the memory, copy ── ... ── continue

No weight crosses the bus, the network or the disk. The handles are what `torch.multiprocessing` makes
of a tensor (CUDA IPC; shared memory on a CPU), pickled, as SGLang's `/update_weights_from_tensor` reads
them. This process only writes pickles and never reads one. Where a server cannot take handles, the
versions that follow go through files.
"""

import asyncio
import base64
import io
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from agentrl.config.sections import PublishSection
from agentrl.distributed.broadcast import Bucket
from agentrl.errors import InferenceError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync.broadcast_delivery import (
    BroadcastRound,
    SendWeights,
    gathered_buckets,
    in_checkpoint,
)
from agentrl.inference.weight_sync.delivery import DiskDelivery, OnOutcome
from agentrl.inference.weight_sync.server_operations import (
    abort_paused,
    close_broadcast,
    open_broadcast,
)
from agentrl.schema import Policy

logger = logging.getLogger(__name__)

_DEVICE = 6
"""Place of the device among the arguments of torch's `rebuild_cuda_tensor`."""


class IpcDelivery:
    """Servers on the trainer's GPU copy the weights from the trainer's memory."""

    def __init__(self, publish: PublishSection, send: SendWeights) -> None:
        """Prepare without sending anything."""
        self._publish = publish
        self._send = send
        self._refusal: str | None = None

    @property
    def needs_files(self) -> bool:
        """False until a server could not take handles."""
        return self._refusal is not None

    async def deliver(
        self, policy: Policy, servers: Mapping[str, SGLangClient], on_outcome: OnOutcome
    ) -> None:
        """See `Delivery.deliver`."""
        if self.needs_files:
            await DiskDelivery(self._publish).deliver(policy, servers, on_outcome)
            return
        started = time.monotonic()
        round_ = BroadcastRound(dict(servers), started + self._publish.publish_timeout_seconds)
        paused_at: dict[str, float] = {}

        async def open_one(name: str, client: SGLangClient) -> None:
            paused_at[name] = time.monotonic()
            await open_broadcast(client, self._publish.publish_mode)

        await round_.each(open_one)
        bucket_bytes = self._publish.weight_sync_bucket_mb << 20
        gathering = gathered_buckets(self._send, bucket_bytes, on_cpu=False)
        async with aclosing(gathering) as buckets:
            async for bucket in buckets:
                await self._install(policy, in_checkpoint(bucket), round_)
                if not round_.servers:
                    break
        await round_.each(lambda _, client: close_broadcast(client))
        ended = time.monotonic()
        for name in round_.servers:
            await on_outcome(name, ended - paused_at[name])
        for name, error in round_.lost.items():
            await on_outcome(name, error)
            await abort_paused(servers[name])
        count = len(round_.servers)
        logger.info(
            "version %d: %d servers copied it in %.3f s", policy.version, count, ended - started
        )

    async def _install(self, policy: Policy, bucket: Bucket, round_: BroadcastRound) -> None:
        """Have the servers of a round copy one bucket, which lives until they have done so."""
        try:
            handles = await asyncio.to_thread(serialized_handles, bucket)
        except RuntimeError as error:
            self._refuse(f"no handles of this memory: {str(error).partition(chr(10))[0]}")
            for name in list(round_.servers):
                round_.drop(name, InferenceError(str(self._refusal)))
            return

        async def install(name: str, client: SGLangClient) -> None:
            try:
                await client.update_weights_from_tensor(
                    [handles],
                    weight_version=str(policy.version) if bucket.is_last else None,
                    flush_cache=bucket.is_last and self._publish.publish_mode != "in_place",
                )
            except InferenceError as error:
                # A server that dies of a handle would die of the next version's, too.
                self._refuse(str(error))
                raise

        await round_.each(install)

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        logger.warning("weights go through files from now on, instead of CUDA IPC: %s", reason)


def serialized_handles(bucket: Bucket) -> str:
    """Return the names and handles of a bucket's tensors as SGLang reads them: a pickle, in base64."""
    buffer = io.BytesIO()
    _HandlePickler(buffer).dump([(name, tensor.detach()) for name, tensor in bucket.named])
    return base64.b64encode(buffer.getvalue()).decode()


class _HandlePickler(ForkingPickler):
    """Pickles handles instead of tensors, and names GPUs by their UUID.

    Indices differ between processes that see different GPUs; SGLang reads both.
    """

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        rebuild: Callable[..., object]
        rebuild, arguments = reductions.reduce_tensor(value)
        if rebuild is reductions.rebuild_cuda_tensor:
            uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
            arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
        return rebuild, arguments
