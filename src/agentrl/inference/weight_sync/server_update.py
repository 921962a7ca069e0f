"""One server, new weights: pause, update, continue.

retract   generations in flight are recomputed under the new weights and go on
in_place  they go on with the cache of the old weights
abort     they are cut; whoever asked for them resumes them
"""

import asyncio
import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.config.sections import PublishSection
from agentrl.errors import InferenceError
from agentrl.inference.client.http_client import SGLangClient
from agentrl.inference.weight_sync.adapter_names import is_of_same_run
from agentrl.inference.wire import adapter_version
from agentrl.schema import Policy

PauseMode = Literal["retract", "in_place", "abort"]

# Before this version a server dies when the cache is flushed while retracted requests wait.
_RETRACT_SINCE = (0, 5, 20)
# The weights are in, only the flush was refused: the update must not be repeated from scratch.
_UPDATED_NOT_FLUSHED = "weights were updated"
_CONTINUE_ATTEMPTS = 3
_CONTINUE_SECONDS = 5.0


async def bring_to(client: SGLangClient, policy: Policy, publish: PublishSection) -> float:
    """Bring a server to a published policy from its files.

    An adapter is loaded beside those that are there: nothing is paused, and what is being generated
    goes on under the adapter that it began with.

    Returns:
        Seconds for which the server was paused.

    Raises:
        InferenceError: as for `update_server`.
    """
    if policy.adapter is None:
        return await update_server(
            client,
            Path(policy.path),
            policy.version,
            mode=publish.publish_mode,
            timeout_seconds=publish.publish_timeout_seconds,
        )
    try:
        async with asyncio.timeout(publish.publish_timeout_seconds):
            if policy.adapter not in await client.adapters():
                await client.load_adapter(policy.adapter, policy.path)
    except TimeoutError:
        raise InferenceError(
            f"{client.base_url} took longer than {publish.publish_timeout_seconds:g} s for an adapter"
        ) from None
    return 0.0


@dataclass(frozen=True)
class Served:
    """What a server can serve."""

    version: int
    adapter: str | None = None

    def is_policy(self, policy: Policy) -> bool:
        """Return whether it is that."""
        return (self.version, self.adapter) == (policy.version, policy.adapter)


async def served(client: SGLangClient, policy: Policy | None) -> Served:
    """Return what a server can serve: the policy it is to serve, or what it has instead."""
    if policy is not None and policy.adapter is not None:
        loaded = await client.adapters()
        if policy.adapter in loaded:
            return Served(policy.version, policy.adapter)
        others = [name for name in loaded if is_of_same_run(name, policy.adapter)]
        if others:
            newest = max(others, key=adapter_version)
            return Served(adapter_version(newest), newest)
    return Served((await client.model_info()).weight_version)


async def update_server(
    client: SGLangClient, path: Path, version: int, *, mode: PauseMode, timeout_seconds: float
) -> float:
    """Bring a server to a policy version; it is told to continue whatever happens.

    Args:
        client: the server's control routes.
        path: Hugging Face directory that the server can read.
        version: policy version of the weights in it.
        mode: what happens to generations in flight.
        timeout_seconds: bound on pause and update together; 5 s come on top when they failed.

    Returns:
        Seconds for which the server was paused.

    Raises:
        InferenceError: the server refused, failed, or took too long. One that hangs may be left
            paused: whoever uses it again brings it up to date first.
    """
    try:
        async with asyncio.timeout(timeout_seconds):
            mode = await supported_mode(client, mode)
            started = time.monotonic()
            try:
                await client.pause(mode)
                await load_weights(client, path, version, flush_cache=mode != "in_place")
            except BaseException:
                # Also when the pause itself failed: its answer may have been lost, not the request.
                with contextlib.suppress(TimeoutError, InferenceError):
                    await asyncio.wait_for(resume(client), _CONTINUE_SECONDS)
                raise
            await resume(client)
            return time.monotonic() - started
    except TimeoutError:
        raise InferenceError(
            f"{client.base_url} took longer than {timeout_seconds:g} s for new weights"
        ) from None


async def load_weights(
    client: SGLangClient, path: Path, version: int, *, flush_cache: bool
) -> None:
    """Have a paused server load weights, and their version with them.

    Raises:
        InferenceError: it has the former weights still.
    """
    try:
        await client.update_weights_from_disk(
            str(path), weight_version=str(version), flush_cache=flush_cache
        )
    except InferenceError as error:
        if _UPDATED_NOT_FLUSHED not in str(error).lower():
            raise
        await client.flush_cache()
        # The front end did not take note of the version, because the call as a whole failed.
        await client.update_weight_version(str(version))


async def resume(client: SGLangClient) -> None:
    """Tell a server to continue, more than once if need be."""
    for attempt in range(_CONTINUE_ATTEMPTS):
        try:
            await client.continue_()
            return
        except InferenceError:
            if attempt == _CONTINUE_ATTEMPTS - 1:
                raise
            await asyncio.sleep(0.2 * (attempt + 1))


async def supported_mode(client: SGLangClient, mode: PauseMode) -> PauseMode:
    """Return the mode, or `abort` where the server is too old for it."""
    if mode != "retract":
        return mode
    info = await client.server_info()
    version = release_of(str(info.get("version", "")))
    return mode if version is None or version >= _RETRACT_SINCE else "abort"


def release_of(version: str) -> tuple[int, int, int] | None:
    """Return the numbers of a version such as `0.5.12.post1`; None when it does not look like one."""
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None
