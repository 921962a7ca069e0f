"""`AgentThread`: runs coroutine agents outside the sampler's own event loop.

Input: an agent function. Output: a function that runs it from any loop. An agent that blocks its
loop (by a synchronous client inside `async def`) waits for the endpoint that the sampler serves: on
a shared loop, both would wait forever.
"""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Iterator
from typing import Any, Self

from agentrl.rollout.agent.agent_loading import (
    IS_ELSEWHERE,
    AgentFunction,
    Returned,
    is_async,
    program_ended,
)
from agentrl.runtime.telemetry.loop_watch import ADVICE_FOR_AGENTS, LoopWatch
from agentrl.schema import MCPTask
from agentrl.schema.agent_endpoint import AgentEndpoint

_END_SECONDS = 2.0


class AgentThread:
    """An event loop in its own thread, started by the first agent that needs it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._watch = LoopWatch("the agents' event loop", ADVICE_FOR_AGENTS)
        self._running = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)

    @classmethod
    @contextlib.contextmanager
    def open(cls) -> Iterator[Self]:
        """Run agents until the context ends; one that still blocks then ends with the process."""
        self = cls()
        try:
            with self._running:
                yield self
        finally:
            if not self._thread.is_alive():
                self._loop.close()

    def _start(self) -> None:
        if self._thread.ident is not None:
            return
        self._thread.start()
        self._running.callback(self._thread.join, _END_SECONDS)
        self._running.callback(self._loop.call_soon_threadsafe, self._loop.stop)
        self._running.enter_context(self._watch.watching(self._loop))

    def _run(self) -> None:
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))

    @property
    def notice(self) -> str:
        """What users should know about it; see `LoopWatch.notice`."""
        return self._watch.notice

    def wrapped(self, agent: AgentFunction) -> AgentFunction:
        """Return a function that runs an agent's coroutines here, where they may block."""
        if getattr(agent, IS_ELSEWHERE, False):
            return agent

        async def play(task: MCPTask, endpoint: AgentEndpoint) -> Returned:
            return await self._run_coroutine(agent(task, endpoint))

        def play_in_thread(
            task: MCPTask, endpoint: AgentEndpoint
        ) -> Returned | Awaitable[Returned]:
            returned = agent(task, endpoint)
            return self._run_coroutine(returned) if inspect.isawaitable(returned) else returned

        wrapper: Any = play if is_async(agent) else play_in_thread
        wrapper.__name__ = getattr(agent, "__name__", type(agent).__name__)
        return wrapper  # type: ignore[no-any-return]

    async def _run_coroutine(self, coroutine: Any) -> Returned:
        self._start()
        caller_loop = asyncio.get_running_loop()
        ended: asyncio.Future[asyncio.Task[Returned]] = caller_loop.create_future()
        started: list[asyncio.Task[Returned]] = []

        def start() -> None:
            started.append(self._loop.create_task(_finished(coroutine)))
            started[0].add_done_callback(report)

        def report(done: "asyncio.Task[Returned]") -> None:
            with contextlib.suppress(RuntimeError):  # the sampler's loop is closed
                caller_loop.call_soon_threadsafe(settle, done)

        def settle(done: "asyncio.Task[Returned]") -> None:
            if not ended.done():
                ended.set_result(done)

        self._loop.call_soon_threadsafe(start)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(lambda: started[0].cancel())
            await ended
            raise
        return ended.result().result()


async def _finished(coroutine: Awaitable[Returned]) -> Returned:
    try:
        return await coroutine
    except SystemExit as end:  # it would end this loop
        raise program_ended(end) from end
