"""`LoopSlots`: how many of something run at once in an event loop."""

import asyncio
from weakref import WeakKeyDictionary


class LoopSlots:
    """As many places in each event loop, for a module whose functions several loops call."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._places = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

    def here(self) -> asyncio.Semaphore:
        """Return the places of the running loop; `async with` waits for one and holds it."""
        return self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.count))
