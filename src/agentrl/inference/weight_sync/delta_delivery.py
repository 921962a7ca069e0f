"""Delivers only changes: servers read a file of changed values instead of all weights.

    compare with what was sent last ── write the delta ── every server: pause, apply, continue

The trainer keeps a copy of the weights it sent last. The first version of a process is sent whole,
in the same format. A server that does not hold the previous version (it joined late, or was taken
out) refuses the delta; it loads the version's files if they are already written, and is otherwise
taken out until its supervisor has loaded them.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl.config.sections import PublishSection
from agentrl.distributed.broadcast import Bucket
from agentrl.errors import ServerRefused
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync.broadcast_delivery import (
    SendWeights,
    gathered_buckets,
    in_checkpoint,
)
from agentrl.inference.weight_sync.delivery import OnOutcome, report
from agentrl.inference.weight_sync.server_operations import update_server, update_to_policy
from agentrl.models.weight_delta import (
    DELTA_FILE,
    TensorChange,
    TensorChecksum,
    WeightDelta,
    change_between,
    write_delta,
)
from agentrl.schema import Policy

logger = logging.getLogger(__name__)


_SUFFIX = "-delta"


@dataclass(frozen=True)
class DeltaSize:
    """Size of a version's delta."""

    sent_share: float
    """Values in the file over all values; a tensor that is sent whole counts in full."""
    num_bytes: int
    """Size of the file that each server read."""
    full_bytes: int
    """Size of all weights."""


class DeltaDelivery:
    """Every server applies the changes since the previous version."""

    needs_files = False

    def __init__(self, publish: PublishSection, send: SendWeights) -> None:
        """Prepare; nothing is sent.

        Args:
            publish: how servers are updated.
            send: source of the weights.
        """
        self._publish = publish
        self._send = send
        self._sent: dict[str, torch.Tensor] = {}
        self._base: str | None = None
        self.size: DeltaSize | None = None
        """Size of the last delivery."""

    async def deliver(
        self, policy: Policy, servers: Mapping[str, SGLangClient], on_outcome: OnOutcome
    ) -> None:
        """See `Delivery.deliver`."""
        started = time.monotonic()
        directory = Path(policy.path).with_name(f"{Path(policy.path).name}{_SUFFIX}")
        await self._write(directory, str(policy.version))
        written = time.monotonic()

        async def update(client: SGLangClient) -> float:
            try:
                return await update_server(
                    client,
                    directory,
                    policy.version,
                    mode=self._publish.publish_mode,
                    timeout_seconds=self._publish.publish_timeout_seconds,
                    load_format="delta",
                )
            except ServerRefused as error:
                if not policy.is_written:
                    raise
                logger.info("%s loads all weights: %s", client.base_url, error)
                return await update_to_policy(client, policy, self._publish)

        await asyncio.gather(
            *(report(name, update(client), on_outcome) for name, client in servers.items())
        )
        assert self.size is not None
        logger.info(
            "version %d: %.2f %% of the values sent, %.1f MB instead of %.1f MB for %d servers "
            "(compared and written in %.3f s, applied in %.3f s)",
            policy.version,
            100 * self.size.sent_share,
            self.size.num_bytes / 1e6,
            self.size.full_bytes / 1e6,
            len(servers),
            written - started,
            time.monotonic() - written,
        )
        for old in directory.parent.glob(f"*{_SUFFIX}"):
            if old != directory:
                await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)

    async def _write(self, directory: Path, version: str) -> None:
        """Compare the weights with those sent last, and write the changes."""
        changes: dict[str, TensorChange] = {}
        checksums: dict[str, TensorChecksum] = {}
        sizes = [0, 0, 0]  # values sent, all values, their bytes
        # A failed attempt leaves values that belong to no version, so the next one sends all.
        base, self._base = self._base, None
        if base is None:
            self._sent.clear()

        def compare(bucket: Bucket) -> None:
            for name, tensor in in_checkpoint(bucket).named:
                new, old = tensor.detach(), self._sent.get(name)
                checksums[name] = TensorChecksum.of(new)
                if (change := change_between(old, new)) is not None:
                    changes[name] = change
                    sizes[0] += change.values.numel()
                    self._sent[name] = new.clone() if old is None else old.copy_(new)
                sizes[1] += new.numel()
                sizes[2] += new.nbytes

        bucket_bytes = self._publish.weight_sync_bucket_mb << 20
        async with aclosing(gathered_buckets(self._send, bucket_bytes, on_cpu=True)) as buckets:
            async for bucket in buckets:
                await asyncio.to_thread(compare, bucket)
        await asyncio.to_thread(write_delta, WeightDelta(base, changes, checksums), directory)
        self._base = version
        num_bytes = (directory / DELTA_FILE).stat().st_size
        self.size = DeltaSize(sizes[0] / sizes[1], num_bytes, sizes[2])
