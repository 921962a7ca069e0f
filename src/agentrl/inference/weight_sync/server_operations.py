"""Sequences of control calls on one server: update, sleep, wake, receive a broadcast.

What happens to generations in flight while a server is paused:

    retract   they are recomputed under the new weights and continue
    in_place  they continue with the cache of the old weights
    abort     they are cut; the client resumes them where they were cut

Input: a client and a policy. Output: a server that serves it, or an `InferenceError`. Independent
of the store and other servers.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.sections import PublishSection
from agentrl.errors import InferenceError, ServerRefused
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync.version_files import is_of_same_run
from agentrl.inference.wire import MIXED_LABEL, PauseMode, adapter_version
from agentrl.runtime.retries import retried
from agentrl.schema import Policy

# Earlier versions crash if the cache is flushed while retracted requests wait.
_RETRACT_SINCE = (0, 5, 20)
# Part of SGLang's message if weights were loaded but the flush was refused. Do not load them again.
_UPDATED_NOT_FLUSHED = "weights were updated"
_CONTINUE_PAUSES = (0.2, 0.4)
_CONTINUE_SECONDS = 5.0
_FLUSH_RETRY_SECONDS = 0.05
_CLEANUP_SECONDS = 3.0
"""Timeout of each cleanup step after a failed broadcast."""
_NOT_FOUND = 404
_WEIGHTS, _CACHE = "weights", "kv_cache"


@dataclass(frozen=True)
class ServedPolicy:
    """The version that a server can serve."""

    version: int
    adapter: str | None = None

    def is_policy(self, policy: Policy) -> bool:
        """Return whether this is the given policy."""
        return (self.version, self.adapter) == (policy.version, policy.adapter)


async def served_policy(client: SGLangClient, policy: Policy | None) -> ServedPolicy:
    """Return `policy` if the server can serve it, else the version that it has."""
    if policy is not None and policy.adapter is not None:
        loaded = await client.adapters()
        if policy.adapter in loaded:
            return ServedPolicy(policy.version, policy.adapter)
        others = [name for name in loaded if is_of_same_run(name, policy.adapter)]
        if others:
            newest = max(others, key=adapter_version)
            return ServedPolicy(adapter_version(newest), newest)
    return ServedPolicy((await client.model_info()).weight_version)


async def update_to_policy(client: SGLangClient, policy: Policy, publish: PublishSection) -> float:
    """Bring a server to a published policy from its files.

    An adapter is loaded alongside the existing ones: nothing is paused, and generations in flight
    continue under the adapter that they started with.
    """
    if policy.adapter is None:
        return await update_server(
            client,
            Path(policy.path),
            policy.version,
            mode=publish.publish_mode,
            timeout_seconds=publish.publish_timeout_seconds,
        )
    async with _time_limit(client, publish.publish_timeout_seconds, "to load an adapter"):
        if policy.adapter not in await client.adapters():
            await client.load_adapter(policy.adapter, policy.path)
    return 0.0


async def update_server(
    client: SGLangClient,
    path: Path,
    version: int,
    *,
    mode: PauseMode,
    timeout_seconds: float,
) -> float:
    """Bring a server to a policy version; in every case it is finally instructed to continue.

    Args:
        client: has the control key.
        path: directory that the server can read.
        version: policy version of the weights in it.
        mode: what happens to generations in flight.
        timeout_seconds: timeout for pause and update together; a failure adds up to 5 s.
    """
    async with _time_limit(client, timeout_seconds, "to load new weights"):
        mode = await supported_mode(client, mode)
        started = time.monotonic()
        try:
            await client.pause(mode)
            await _load_weights(client, path, version, flush_cache=mode != "in_place")
        except BaseException:
            # Also after a failed pause: the server may have paused although its response was lost.
            with contextlib.suppress(TimeoutError, InferenceError):
                await asyncio.wait_for(_resume(client), _CONTINUE_SECONDS)
            raise
        await _resume(client)
        return time.monotonic() - started


async def put_to_sleep(client: SGLangClient, *, mode: PauseMode, timeout_seconds: float) -> None:
    """Have a server release the memory of its weights and its cache.

        pause ─> flush ─> release ┄ the trainer computes ┄> weights' memory ─> weights ─> cache ─> continue

    Generations in flight survive: the server retracts them, or aborts them and the client retries,
    which waits during the pause. A server that fails midway is in an unknown state; its supervisor
    restarts it.

    Args:
        client: has the control key.
        mode: what happens to generations in flight, `retract` or `abort`.
        timeout_seconds: timeout for the whole sequence.
    """
    async with _time_limit(client, timeout_seconds, "to release its memory"):
        if not (await client.server_info()).get("enable_memory_saver"):
            raise InferenceError(
                f"{client.base_url} cannot release memory; start it with --colocated, too "
                "(SGLang's --enable-memory-saver)"
            )
        await client.pause(await supported_mode(client, mode))
        await _flush_when_idle(client)
        await client.release_memory([_CACHE, _WEIGHTS])


async def wake(client: SGLangClient, policy: Policy, *, timeout_seconds: float) -> float:
    """Make a sleeping server reallocate its memory and continue with a published policy.

    Returns:
        Duration in seconds.
    """
    started = time.monotonic()
    async with _time_limit(client, timeout_seconds, "to wake up"):
        await client.resume_memory([_WEIGHTS])
        await _load_weights(client, Path(policy.path), policy.version, flush_cache=True)
        # Last, so that the cache does not compete for memory while the weights are loaded.
        await client.resume_memory([_CACHE])
        await _resume(client)
    return time.monotonic() - started


async def open_broadcast(client: SGLangClient, mode: PauseMode) -> None:
    """Pause a server and open its update session; from now on, its weights belong to no version."""
    await client.pause(await supported_mode(client, mode))
    await client.update_weight_version(MIXED_LABEL)
    try:
        await _ignore_not_found(client.begin_weight_update())
    except ServerRefused:
        # A round that failed, or a trainer that died, left a session open.
        await client.end_weight_update()
        await client.begin_weight_update()


async def close_broadcast(client: SGLangClient, group: str | None = None) -> None:
    """Close a server's update session, after which it continues with complete weights."""
    await _ignore_not_found(client.end_weight_update())
    if group is not None:
        await client.destroy_weights_update_group(group)
    await _resume(client)


async def abandon_group(client: SGLangClient, group: str) -> None:
    """Have a server leave a failed group, if it ever joined."""
    with contextlib.suppress(InferenceError, TimeoutError):
        async with asyncio.timeout(_CLEANUP_SECONDS):
            await client.destroy_weights_update_group(group)


async def abort_paused(client: SGLangClient) -> None:
    """Abort a paused server's generations; it stays paused until it has complete weights."""
    with contextlib.suppress(InferenceError, TimeoutError):
        async with asyncio.timeout(_CLEANUP_SECONDS):
            await client.abort()
            await _ignore_not_found(client.end_weight_update())


async def supported_mode(client: SGLangClient, mode: PauseMode) -> PauseMode:
    """Return the mode, or `abort` if the server is too old for it."""
    if mode != "retract":
        return mode
    info = await client.server_info()
    version = release_of(str(info.get("version", "")))
    return mode if version is None or version >= _RETRACT_SINCE else "abort"


def release_of(version: str) -> tuple[int, int, int] | None:
    """Return the numbers of a version such as `0.5.12.post1`; None if it does not look like one."""
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


@asynccontextmanager
async def _time_limit(client: SGLangClient, seconds: float, purpose: str) -> AsyncIterator[None]:
    """Limit the time of a block; a timeout raises an `InferenceError` that names the purpose."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise InferenceError(
            f"{client.base_url} took longer than {seconds:g} s {purpose}"
        ) from None


async def _load_weights(
    client: SGLangClient,
    path: Path,
    version: int,
    *,
    flush_cache: bool,
) -> None:
    """Have a paused server load weights and their version label."""
    try:
        await client.update_weights_from_disk(
            str(path),
            weight_version=str(version),
            flush_cache=flush_cache,
        )
    except InferenceError as error:
        if _UPDATED_NOT_FLUSHED not in str(error).lower():
            raise
        await client.flush_cache()
        # SGLang's front end kept the old label, because the call as a whole failed.
        await client.update_weight_version(str(version))


async def _resume(client: SGLangClient) -> None:
    """Instruct a server to continue, repeatedly if necessary."""
    await retried(client.continue_, on=InferenceError, pauses=_CONTINUE_PAUSES)


async def _flush_when_idle(client: SGLangClient) -> None:
    """Flush the cache as soon as nothing runs. Aborted sequences run for one more step."""
    while True:
        try:
            await client.flush_cache()
        except ServerRefused as error:
            if error.status != 400:
                raise
            await asyncio.sleep(_FLUSH_RETRY_SECONDS)
        else:
            return


async def _ignore_not_found(call: Awaitable[None]) -> None:
    """Await a call of a route that only SGLang since about 0.5.20 has, and needs."""
    try:
        await call
    except ServerRefused as error:
        if error.status != _NOT_FOUND:
            raise
