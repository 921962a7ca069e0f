"""Which of several servers is the best one for a generation.

What a generation costs least on is the server that has its prefix; what lets all servers work is
to give each as many requests as the others. The first counts as long as the second is not far off.

As all have the same number in flight, each gets work in proportion to its speed: at N requests, a
server that needs R seconds for one ends N / R a second (Little's law). A server of less memory says
when it has enough: one that is pressed gets no new conversation while another is not.
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
"""Requests by which a conversation's server may be busier than the idlest one before it is left:
the cached keys and values of its history are worth that much waiting."""
_GROUP_EXCESS = 0.25
"""Share by which a server may have more than its equal part of the requests, for the sake of the
questions that it has in its cache."""
_PRESSED_REPORTS = 2
"""Reports in a row after which a server counts as pressed. One alone may be of the moment after a
burst or an update, when what runs has to be computed again."""


class Pressure:
    """Which servers are pressed, by what they last reported."""

    def __init__(self) -> None:
        self._seen: dict[str, datetime] = {}
        self._in_a_row: Counter[str] = Counter()
        self.num_reports = 0
        """Times at which something new was heard."""

    def note(self, services: Sequence[InferenceService]) -> None:
        """Take over what servers report; what was read before does not count again."""
        is_news = False
        told = {s.base_url.rstrip("/"): s.load for s in services if s.status == "up" and s.load}
        for url in self._seen.keys() - told.keys():
            del self._seen[url], self._in_a_row[url]
        for url, load in told.items():
            if self._seen.get(url) != load.at:
                self._seen[url] = load.at
                self._in_a_row[url] = self._in_a_row[url] + 1 if load.is_pressed else 0
                is_news = True
        self.num_reports += is_news

    def is_pressed(self, url: str) -> bool:
        """Whether a server would let further requests wait."""
        return self._in_a_row[url] >= _PRESSED_REPORTS

    @property
    def is_known(self) -> bool:
        """Whether any server tells how busy it is."""
        return bool(self._seen)

    @property
    def is_general(self) -> bool:
        """Whether at least half of the servers that tell are pressed."""
        return self._is_half(_PRESSED_REPORTS)

    @property
    def is_coming(self) -> bool:
        """Whether half of them may be, by their last report alone."""
        return self._is_half(1)

    def _is_half(self, num_reports: int) -> bool:
        pressed = sum(self._in_a_row[url] >= num_reports for url in self._seen)
        return 2 * pressed >= len(self._seen) > 0


class LoadBalancer:
    """Chooses servers; remembers where a conversation was."""

    def __init__(self, pressure: Pressure) -> None:
        self._pressure = pressure
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self.in_flight: Counter[str] = Counter()
        """Requests of this process on each server."""

    def choose(self, key: str, group: str | None, candidates: Collection[str]) -> str:
        """Return the server for a generation.

        Args:
            key: of the conversation, whose history its last server has.
            group: of conversations that begin alike; their first turns share a server, as far as
                that does not get too many.
            candidates: addresses to choose from; not empty.
        """
        free = [url for url in candidates if not self._pressure.is_pressed(url)] or candidates
        # Ties are broken by chance: samplers must not all begin with the same server.
        idlest = min(free, key=lambda url: (self.in_flight[url], random.random()))
        known = self._sticky.get(key)
        if known is not None and known in candidates:
            # One that is pressed throws cached prefixes out: it is not worth waiting for.
            slack = 0 if self._pressure.is_pressed(known) else _STICKY_SLACK
            chosen = known if self._is_near(known, idlest, slack) else idlest
        elif group is not None:
            chosen = self._home(group, free)
        else:
            chosen = idlest
        self._sticky[key] = chosen
        self._sticky.move_to_end(key)
        if len(self._sticky) > _STICKY_KEYS:
            self._sticky.popitem(last=False)
        return chosen

    def forget(self, key: str) -> None:
        """Let a conversation begin anew, as its server failed."""
        self._sticky.pop(key, None)

    def _is_near(self, url: str, idlest: str, slack: int) -> bool:
        return self.in_flight[url] <= self.in_flight[idlest] + slack

    def _home(self, group: str, urls: Collection[str]) -> str:
        """Return the server of a group, which all processes agree upon without a word.

        Every server has a rank for the group (rendezvous hashing, Thaler and Ravishankar 1998); the
        first that has less than its part and a bit counts (hashing with bounded loads, Mirrokni,
        Thorup and Zadimoghaddam 2018).
        """

        def rank(url: str) -> bytes:
            return hashlib.blake2b(f"{group} {url}".encode(), digest_size=8).digest()

        equal_part = (sum(self.in_flight[url] for url in urls) + 1) / len(urls)
        most = math.ceil((1 + _GROUP_EXCESS) * equal_part)
        return max((url for url in urls if self.in_flight[url] < most), key=rank)
