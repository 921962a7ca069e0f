"""Chooses a server for each generation.

Two aims compete: a generation is cheapest on the server that has its prefix in cache, and all
servers are busy when each has the same number of requests. The prefix wins unless its server has
too many requests.

With equal numbers in flight, each server gets work in proportion to its speed: at N requests in
flight, a server that needs R seconds for one completes N / R a second (Little's law). A server with
less memory reports when it is full: one under pressure gets no new conversation while another has
room.
"""

import hashlib
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from datetime import datetime

from agentrl.schema import InferenceService

_STICKY_KEYS = 100_000
_STICKY_SLACK = 8
"""How many more requests than the least loaded server a conversation's server may have and still
be chosen. The cached keys and values of the history are worth that much waiting.
"""
_GROUP_EXCESS = 0.25
"""Share by which a group's server may exceed its fair share of the requests, because its cache
holds the prompts of the group.
"""
_PRESSED_REPORTS = 2
"""Consecutive reports of memory pressure after which a server counts as pressed. A single report
may follow a burst or an update, when running requests are recomputed.
"""


class Pressure:
    """Tracks which servers are under memory pressure, by their latest load reports."""

    def __init__(self) -> None:
        self._reported_at: dict[str, datetime] = {}
        self._num_pressed: Counter[str] = Counter()
        self._num_short: Counter[str] = Counter()
        self._places: dict[str, int] = {}
        self.num_reports = 0
        """Number of new reports received."""

    def note(self, services: Sequence[InferenceService]) -> None:
        """Record what servers report; a report counts only once."""
        is_new = False
        loads = {s.base_url.rstrip("/"): s.load for s in services if s.status == "up" and s.load}
        for url in self._reported_at.keys() - loads.keys():
            del self._reported_at[url], self._num_pressed[url], self._num_short[url]
        # A server that is being updated does not report, and keeps its places.
        known = {s.base_url.rstrip("/") for s in services if s.status != "down"}
        self._places = {url: n for url, n in self._places.items() if url in known}
        self._places |= {url: load.max_running for url, load in loads.items()}
        for url, load in loads.items():
            if self._reported_at.get(url) != load.at:
                self._reported_at[url] = load.at
                self._num_pressed[url] = self._num_pressed[url] + 1 if load.is_pressed else 0
                self._num_short[url] = self._num_short[url] + 1 if load.lacks_memory else 0
                is_new = True
        self.num_reports += is_new

    def is_pressed(self, url: str) -> bool:
        """Return whether further requests would have to wait on a server."""
        return self._num_pressed[url] >= _PRESSED_REPORTS

    @property
    def num_places(self) -> int | None:
        """Requests that the servers run at once; None if they do not say."""
        return sum(self._places.values()) if self._places and all(self._places.values()) else None

    @property
    def is_known(self) -> bool:
        """Whether any server reports its load."""
        return bool(self._reported_at)

    @property
    def is_general(self) -> bool:
        """Whether at least half of the reporting servers lack memory, or places that they do not tell."""
        return self._is_half(_PRESSED_REPORTS)

    @property
    def may_be_general(self) -> bool:
        """Whether at least half of them may, by their last report alone."""
        return self._is_half(1)

    def _is_half(self, num_reports: int) -> bool:
        num_short = sum(self._num_short[url] >= num_reports for url in self._reported_at)
        return 2 * num_short >= len(self._reported_at) > 0


class LoadBalancer:
    """Chooses servers, and remembers each conversation's server."""

    def __init__(self, pressure: Pressure) -> None:
        self._pressure = pressure
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self.in_flight: Counter[str] = Counter()
        """Requests of this process on each server."""

    def choose(self, key: str, group: str | None, candidates: Collection[str]) -> str:
        """Return the server for a generation."""
        free = [url for url in candidates if not self._pressure.is_pressed(url)] or candidates
        # Ties are broken at random. Otherwise, all samplers would start with the same server.
        least_loaded = min(free, key=lambda url: (self.in_flight[url], random.random()))
        previous = self._sticky.get(key)
        if previous is not None and previous in candidates:
            # A server under pressure evicts cached prefixes, so it is not worth waiting for.
            slack = 0 if self._pressure.is_pressed(previous) else _STICKY_SLACK
            chosen = (
                previous if self._is_within_slack(previous, least_loaded, slack) else least_loaded
            )
        elif group is not None:
            chosen = self._group_server(group, free)
        else:
            chosen = least_loaded
        self._sticky[key] = chosen
        self._sticky.move_to_end(key)
        if len(self._sticky) > _STICKY_KEYS:
            self._sticky.popitem(last=False)
        return chosen

    def forget(self, key: str) -> None:
        """Forget a conversation's server, because it failed."""
        self._sticky.pop(key, None)

    def _is_within_slack(self, url: str, least_loaded: str, slack: int) -> bool:
        return self.in_flight[url] <= self.in_flight[least_loaded] + slack

    def _group_server(self, group: str, urls: Collection[str]) -> str:
        """Return the server of a group, on which all processes agree without communicating.

        Every server has a rank for the group (rendezvous hashing, Thaler and Ravishankar 1998). The
        first one whose load is below its bound is chosen (consistent hashing with bounded loads,
        Mirrokni, Thorup and Zadimoghaddam 2018).
        """

        def rank(url: str) -> bytes:
            return hashlib.blake2b(f"{group} {url}".encode(), digest_size=8).digest()

        fair_share = (sum(self.in_flight[url] for url in urls) + 1) / len(urls)
        bound = math.ceil((1 + _GROUP_EXCESS) * fair_share)
        return max((url for url in urls if self.in_flight[url] < bound), key=rank)
