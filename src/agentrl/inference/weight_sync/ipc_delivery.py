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
from agentrl.inference.weight_sync.delivery import DiskDelivery, OnOutcome
from agentrl.inference.weight_sync.memory_delivery import (
    DeliveryRound,
    MemoryDelivery,
    SendWeights,
)
from agentrl.inference.weight_sync.server_operations import close_broadcast
from agentrl.schema import Policy

logger = logging.getLogger(__name__)

_DEVICE = 6
"""Place of the device among the arguments of torch's `rebuild_cuda_tensor`."""


class IpcDelivery(MemoryDelivery):
    """Servers on the trainer's GPU copy the weights from the trainer's memory."""

    def __init__(self, publish: PublishSection, send: SendWeights) -> None:
        """Prepare without sending anything."""
        super().__init__(publish, send)
        self._refusal: str | None = None

    @property
    def needs_files(self) -> bool:  # type: ignore[override]
        """False until a server could not take handles."""
        return self._refusal is not None

    async def deliver(
        self, policy: Policy, servers: Mapping[str, SGLangClient], on_outcome: OnOutcome
    ) -> None:
        """See `Delivery.deliver`."""
        by_files = DiskDelivery(self._publish)
        deliver = by_files.deliver if self.needs_files else super().deliver
        await deliver(policy, servers, on_outcome)

    async def _run_round(self, round_: DeliveryRound) -> bool:
        await self._open(round_)
        async with aclosing(self._buckets(round_)) as buckets:
            async for bucket in buckets:
                with self._phase("install"):
                    await self._install(bucket, round_)
                if not round_.servers:
                    break
        with self._phase("close"):
            await round_.each(lambda _, client: close_broadcast(client))
        return True

    async def _install(self, bucket: Bucket, round_: DeliveryRound) -> None:
        """Have the servers of a round copy one bucket, which lives until they have done so."""
        try:
            handles = await asyncio.to_thread(serialized_handles, bucket)
        except RuntimeError as error:
            self._refuse(f"no handles of this memory: {str(error).partition(chr(10))[0]}")
            for name in list(round_.servers):
                round_.drop(name, InferenceError(str(self._refusal)))
            return
        labels = self._labels(round_.policy, bucket)

        async def install(name: str, client: SGLangClient) -> None:
            try:
                await client.update_weights_from_tensor([handles], **labels)
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
