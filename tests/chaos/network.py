"""Links between two processes that can be cut or held up: a TCP proxy each.

What a client sends to `Link.address` arrives at the target, and back. The proxies run on one thread
beside the harness, which blocks while it starts programs.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

Hole = Literal["cut", "silence"]
_CHUNK = 65536


class Link:
    """One process's way to another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, port: int) -> None:
        self._loop = loop
        self._target = port
        self._open = asyncio.Event()
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen."""
        self._open.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def begin(self, hole: Hole) -> None:
        """Cut the connections and refuse new ones, or let nothing through while they stay."""
        self._loop.call_soon_threadsafe(self._begin, hole)

    def end(self) -> None:
        """Let everything through again; what was held up arrives now."""
        self._loop.call_soon_threadsafe(self._end)

    def _begin(self, hole: Hole) -> None:
        self._open.clear()
        if hole == "cut":
            self._is_cut = True
            self._abort()

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        assert self._server is not None
        self._server.close()
        self._is_cut = True
        self._abort()
        self._open.set()

    def _end(self) -> None:
        self._is_cut = False
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        self._writers -= {writer, back}
        for one in (writer, back):
            one.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(_CHUNK):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        sink.close()


class Network:
    """All links of a run."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.links: dict[str, Link] = {}

    def link(self, name: str, port: int) -> Link:
        """Make a link to a local port; a name like "trainer>mongod" says between whom."""
        link = Link(self._loop, port)
        asyncio.run_coroutine_threadsafe(link.start(), self._loop).result(10)
        self.links[name] = link
        return link


@contextmanager
def network() -> Iterator[Network]:
    """Yield a network; its connections end with the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    found = Network(loop)
    try:
        yield found
    finally:
        asyncio.run_coroutine_threadsafe(_close(found), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _close(found: Network) -> None:
    for link in found.links.values():
        await link.close()
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    if rest:
        await asyncio.wait(rest, timeout=5)
    await asyncio.sleep(0)  # aborted transports close their sockets in the next round
