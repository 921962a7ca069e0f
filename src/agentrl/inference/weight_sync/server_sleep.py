"""One server on the trainer's device: it gives its memory up, and wakes on new weights.

    pause ─> flush ─> release ┄┄ the trainer computes ┄┄> weights' memory ─> weights ─> cache ─> continue

What is in flight stays in flight: retracted on the server, or cut and asked for again by the
client, which waits at the pause. A server that fails on the way is in a state that nobody knows;
its keeper starts it again.
"""

import asyncio
import time
from pathlib import Path

from agentrl.errors import InferenceError, ServerRefused
from agentrl.inference.client.http_client import SGLangClient
from agentrl.inference.weight_sync.server_update import (
    PauseMode,
    load_weights,
    resume,
    supported_mode,
)
from agentrl.schema import Policy

_FLUSH_AGAIN_SECONDS = 0.05
_WEIGHTS, _CACHE = "weights", "kv_cache"


async def put_to_sleep(client: SGLangClient, *, mode: PauseMode, timeout_seconds: float) -> None:
    """Have a server give up the memory of its weights and its cache.

    Args:
        client: the server's control routes.
        mode: what happens to generations in flight, `retract` or `abort`.
        timeout_seconds: bound on all of it.

    Raises:
        InferenceError: it cannot, failed, or took too long.
    """
    try:
        async with asyncio.timeout(timeout_seconds):
            if not (await client.server_info()).get("enable_memory_saver"):
                raise InferenceError(
                    f"{client.base_url} gives no memory up: start it with --colocated, too "
                    "(SGLang's --enable-memory-saver)"
                )
            await client.pause(await supported_mode(client, mode))
            await _flush(client)
            await client.release_memory([_CACHE, _WEIGHTS])
    except TimeoutError:
        raise InferenceError(
            f"{client.base_url} took longer than {timeout_seconds:g} s to give its memory up"
        ) from None


async def wake(client: SGLangClient, policy: Policy, *, timeout_seconds: float) -> float:
    """Have a sleeping server take its memory again and go on under a published policy.

    The cache comes last, so that it is not in the way while weights are loaded.

    Returns:
        Seconds that it took.

    Raises:
        InferenceError: it failed, or took too long.
    """
    started = time.monotonic()
    try:
        async with asyncio.timeout(timeout_seconds):
            await client.resume_memory([_WEIGHTS])
            await load_weights(client, Path(policy.path), policy.version, flush_cache=True)
            await client.resume_memory([_CACHE])
            await resume(client)
    except TimeoutError:
        raise InferenceError(
            f"{client.base_url} took longer than {timeout_seconds:g} s to wake up"
        ) from None
    return time.monotonic() - started


async def _flush(client: SGLangClient) -> None:
    """Flush the cache as soon as nothing runs: what was aborted is computed for one more step."""
    while True:
        try:
            await client.flush_cache()
        except ServerRefused as error:
            if error.status != 400:
                raise
            await asyncio.sleep(_FLUSH_AGAIN_SECONDS)
        else:
            return
