"""Generations over all registered servers, which may fail or be updated during a generation.

Input: the store's records of the servers (`ServerPool.update`), and requests. Output: complete
generations. Independent of the store and of rollouts.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

import numpy as np
from pydantic import SecretStr

from agentrl.errors import (
    InferenceError,
    NoServerAvailable,
    ServerRefused,
    ServerUnreachable,
)
from agentrl.inference.client.load_balancing import LoadBalancer, Pressure
from agentrl.inference.client.quarantine import Quarantine
from agentrl.inference.client.sglang_client import OnPartial, SGLangClient
from agentrl.inference.server_keys import with_data_key
from agentrl.inference.wire import MIN_SEED, GenerateRequest, GenerateResult, join_results, new_rid
from agentrl.schema import InferenceService

logger = logging.getLogger(__name__)

_AVOID_SECONDS = 3.0
"""How long a failed server is avoided while others are available. The store takes longer to notice
that a server is gone.
"""
_CHECK_SECONDS = 0.05
"""Shortest time between two checks of a deadline."""
_RETRY_SECONDS = (0.1, 0.3, 1.0, 3.0, 5.0, 5.0)
_PROBE_SECONDS, _PROBE_PAUSE_SECONDS = 5.0, 0.3
"""Timeout of a probe, and the pause before the next one."""


class SamplingClock:
    """A clock in seconds that stops while all servers sleep, because the trainer has their device.

    A rollout that waits for the trainer to release the device thus loses none of its own time.
    """

    def __init__(self) -> None:
        self._seconds_asleep = 0.0
        self._asleep_since: float | None = None

    def note(self, services: Sequence[InferenceService]) -> None:
        """Record the current state of the registered servers."""
        statuses = {service.status for service in services if service.status != "down"}
        now = time.monotonic()
        if self._asleep_since is not None:
            self._seconds_asleep += now - self._asleep_since
        self._asleep_since = now if statuses == {"asleep"} else None

    def now(self) -> float:
        """Return the time in seconds; only differences are meaningful."""
        awake_until = time.monotonic() if self._asleep_since is None else self._asleep_since
        return awake_until - self._seconds_asleep

    @asynccontextmanager
    async def timeout_at(self, deadline: float) -> AsyncIterator[None]:
        """Bound a block by a deadline on this clock."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as bound:
            timer: asyncio.Handle | None = None

            def check() -> None:
                nonlocal timer
                remaining = deadline - self.now()
                if remaining > 0:
                    timer = loop.call_later(max(remaining, _CHECK_SECONDS), check)
                else:
                    bound.reschedule(loop.time())

            check()
            try:
                yield
            finally:
                if timer is not None:
                    timer.cancel()


class ServerPool:
    """Async context manager over the clients of all registered servers."""

    def __init__(
        self,
        *,
        api_key: SecretStr | None = None,
        gateway: str | None = None,
        no_server_seconds: float = 60.0,
    ) -> None:
        """Create an empty pool; `update` fills it.

        Args:
            api_key: bearer key of the data routes.
            gateway: address that is used instead of the servers'; the gateway chooses among them.
            no_server_seconds: how long a generation waits for a server before it fails.
        """
        self._api_key = api_key
        self._no_server_seconds = no_server_seconds
        self._clients: dict[str, SGLangClient] = {}
        self._usable: set[str] = set()
        self._adapters: dict[str, str | None] = {}
        self._take_priorities = False
        self._down_futures: dict[str, asyncio.Future[None]] = {}
        self.pressure = Pressure()
        self.clock = SamplingClock()
        """Stops while all servers sleep."""
        self._balancer = LoadBalancer(self.pressure)
        self._avoided_until: dict[str, float] = {}
        self._quarantine = Quarantine()
        self._changed = asyncio.Event()
        self._gateway = gateway.rstrip("/") if gateway else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.close()

    def update(self, services: Sequence[InferenceService]) -> None:
        """Adopt the registered servers.

        A server that is being updated counts as usable, since it holds requests and answers them
        later. A server without a proof of the key is ignored, because requests would send it the
        key. Generations on a server that is `down` are abandoned, since it may hang. A server that
        is merely missing from `services` keeps its generations, since its supervisor may be slow.
        """
        services = with_data_key(services, self._api_key)
        self.pressure.note(services)
        self.clock.note(services)
        self._usable = {s.base_url.rstrip("/") for s in services if s.status != "down"}
        self._adapters = {s.base_url.rstrip("/"): s.adapter for s in services}
        self._take_priorities = all(s.takes_priorities for s in services if s.status != "down")
        targets = {self._gateway} if self._gateway else self._usable
        for url in targets - self._clients.keys():
            self._clients[url] = SGLangClient(url, api_key=self._api_key)
        for service in services:
            url = service.base_url.rstrip("/")
            if service.status == "down" and url in self._down_futures:
                self._down_futures.pop(url).set_result(None)
        self._changed.set()

    @property
    def num_requests(self) -> int:
        """Generations of this process that are at a server."""
        return self._balancer.in_flight.total()

    @property
    def num_servers(self) -> int:
        """Number of servers that accept generations."""
        return len(self._usable)

    async def generate(
        self,
        key: str,
        request: GenerateRequest,
        on_partial: OnPartial | None = None,
        *,
        group: str | None = None,
    ) -> GenerateResult:
        """Sample a continuation on some server.

        A generation that a server cut short (for an update, say) is resumed at that point. If its
        server is lost, it continues on another server: from the last streamed token, or from the
        start if it was not streamed. A generation that is constrained by a grammar always starts
        over, because a server's grammar state starts with the request; it is not streamed.
        """
        sampled: GenerateResult | None = None
        streamed: list[GenerateResult] = []  # the latest partial result, if any
        failures = 0
        trial = self._quarantine.trial(request)

        def stream(partial: GenerateResult) -> None:
            streamed[:] = [_join_results(sampled, partial)]
            if on_partial is not None:
                on_partial(streamed[0])

        is_constrained = request.sampling.grammar is not None
        callback = None if on_partial is None or is_constrained else stream
        while True:
            remaining = _remaining_request(request, sampled)
            streamed.clear()
            try:
                send = partial(self._generate_once, key, group, remaining, callback)
                result = await trial.send(send, self._wait_for_response)
                merged = _join_results(sampled, result)
            except (ServerRefused, ServerUnreachable) as error:
                if isinstance(error, ServerRefused) and not error.is_transient:
                    raise
                failures = await self._after_failure(error, failures)
                if not streamed:
                    continue
                result = merged = streamed[0]
            if result.finish_reason != "abort":
                return merged
            if len(merged.output_ids) >= request.sampling.max_new_tokens:
                return merged.model_copy(update={"finish_reason": "length"})
            if not len(result.output_ids):
                error_text = f"{result.server} keeps cutting the generation short"
                failures = await self._after_failure(InferenceError(error_text), failures)
            sampled = merged if len(merged.output_ids) and not is_constrained else None

    async def _generate_once(
        self, key: str, group: str | None, request: GenerateRequest, on_partial: OnPartial | None
    ) -> GenerateResult:
        url = self._balancer.choose(key, group, await self._candidates())
        self._balancer.in_flight[url] += 1
        try:
            return await self._generate_unless_down(url, request, on_partial)
        except (ServerUnreachable, ServerRefused) as error:
            if isinstance(error, ServerUnreachable) or error.is_transient:
                self._avoided_until[url] = time.monotonic() + _AVOID_SECONDS
                self._balancer.forget(key)
            raise
        finally:
            self._balancer.in_flight[url] -= 1

    async def _generate_unless_down(
        self, url: str, request: GenerateRequest, on_partial: OnPartial | None
    ) -> GenerateResult:
        if url not in self._down_futures:
            self._down_futures[url] = asyncio.get_running_loop().create_future()
        down = self._down_futures[url]
        priority = request.priority if self._take_priorities else None
        request = request.model_copy(
            update={"adapter": self._adapters.get(url), "priority": priority}
        )
        generating = asyncio.create_task(self._clients[url].generate(request, on_partial))
        try:
            futures: set[asyncio.Future[Any]] = {generating, down}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not generating.done():
                raise ServerUnreachable(f"{url} is down")
            return generating.result()
        finally:
            generating.cancel()

    async def _after_failure(self, error: InferenceError, failures: int) -> int:
        if failures >= len(_RETRY_SECONDS):
            raise error
        logger.warning("%s; retrying", error)
        await asyncio.sleep(_RETRY_SECONDS[failures])
        return failures + 1

    async def _wait_for_response(self) -> None:
        """Return once a server responds; avoid the others for a while."""
        deadline = time.monotonic() + self._no_server_seconds
        while True:
            urls = sorted(await self._candidates())
            alive = await asyncio.gather(*map(self._responds, urls))
            now = time.monotonic()
            unresponsive = [url for url, is_alive in zip(urls, alive, strict=True) if not is_alive]
            self._avoided_until |= dict.fromkeys(unresponsive, now + _AVOID_SECONDS)
            if any(alive):
                return
            if now > deadline:
                raise NoServerAvailable(
                    f"no inference server responded for {self._no_server_seconds:g} s: {urls[0]}"
                )
            await asyncio.sleep(_PROBE_PAUSE_SECONDS)

    async def _responds(self, url: str) -> bool:
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                return await self._clients[url].answers()
        except TimeoutError:
            return False

    async def _candidates(self) -> set[str]:
        """Return the addresses to choose from, once a server is up."""
        try:
            async with asyncio.timeout(self._no_server_seconds):
                while not self._usable:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise NoServerAvailable(
                f"no inference server was up for {self._no_server_seconds:g} s; start one with "
                "`agentrl serve`, or check its log"
            ) from None
        if self._gateway is not None:
            return {self._gateway}
        now = time.monotonic()
        available = {url for url in self._usable if self._avoided_until.get(url, 0.0) <= now}
        # If all have failed recently, the next attempt may use any of them.
        return available or self._usable


def _join_results(sampled: GenerateResult | None, result: GenerateResult) -> GenerateResult:
    return result if sampled is None else join_results((sampled, result))


def _remaining_request(request: GenerateRequest, sampled: GenerateResult | None) -> GenerateRequest:
    """Return the request for the part after `so_far`, under a new id."""
    if sampled is None:
        return request.model_copy(update={"rid": new_rid()})
    sampling = request.sampling
    num_sampled = len(sampled.output_ids)
    remaining = sampling.model_copy(
        update={
            "max_new_tokens": sampling.max_new_tokens - num_sampled,
            # The same seed would reuse the random numbers of the first part for later positions.
            "seed": None if sampling.seed is None else _wrap_seed(sampling.seed + num_sampled),
        }
    )
    ids = np.concatenate([request.input_ids, sampled.output_ids])
    return request.model_copy(update={"rid": new_rid(), "input_ids": ids, "sampling": remaining})


def _wrap_seed(seed: int) -> int:
    """Wrap a seed around to a signed integer of 64 bits."""
    return (seed - MIN_SEED) % 2**64 + MIN_SEED
