"""`AgentSampler`: a slot played by somebody else's agent."""

import asyncio
import contextlib
import inspect
import logging
import socket
import threading
from collections.abc import Iterator

from agentrl.errors import AgentError, AgentRLError
from agentrl.rollout.agent.endpoint import AgentEndpoint, AgentFunction
from agentrl.rollout.agent.gateway import Gateway
from agentrl.rollout.agent.recording import RecordingSession
from agentrl.rollout.async_sampler import AsyncSampler, RolloutResult
from agentrl.rollout.context import RolloutContext
from agentrl.schema import MCPTask, Record, Score

log = logging.getLogger(__name__)

CANCEL_SECONDS = 5.0
"""How long an agent whose time is up is waited for after it was cancelled."""
_INFRASTRUCTURE = (AgentRLError, ConnectionError, TimeoutError, socket.gaierror)


class AgentSampler(AsyncSampler[MCPTask]):
    """Plays a task by running an agent against the gateway.

    What the agent returns is the answer, or holds it inside the task's answer schema. An agent that
    raises did so because of what the policy said (`agent_error`, worth 0), unless a failure of the
    infrastructure is behind it, or the policy was not asked at all: that ends the attempt, and
    nothing is scored.
    """

    def __init__(
        self,
        task: MCPTask,
        record: Record,
        context: RolloutContext,
        *,
        agent: AgentFunction,
        gateway: Gateway,
    ) -> None:
        super().__init__(task, record, context)
        self._agent = agent
        self._gateway = gateway
        self._error = ""

    async def run(self) -> RolloutResult:
        """Run the agent to its end, or to the end of its time."""
        self.context.check_scorer(self.task)
        async with self._gateway.session(self) as session:
            playing = asyncio.create_task(self._play(self._gateway.endpoint(session)))
            try:
                with contextlib.suppress(TimeoutError):
                    async with self.context.servers.clock.timeout_at(self.deadline):
                        await asyncio.wait({playing})
            finally:
                in_time = playing.done()
                await self._end(playing)
        if session.failure is not None:
            raise session.failure
        if not in_time:
            return self._out_of_time()
        error = playing.exception()
        if error is not None:
            return self._after_error(error, session)
        return self._answered(playing.result(), session)

    async def evaluate_record(self, result: RolloutResult) -> Score:
        """Let the task's scorer judge the answer; a rollout without an answer scores 0."""
        reason = self._error or result.outcome
        return await self.context.score(self.task, result.final_answer, no_answer=reason)

    async def _play(self, endpoint: AgentEndpoint) -> object:
        answer: object
        if inspect.iscoroutinefunction(self._agent):
            answer = await self._agent(self.task, endpoint)
        else:
            answer = await _in_thread(self._agent, self.task, endpoint)
            if inspect.isawaitable(answer):
                answer = await answer
        return answer

    async def _end(self, playing: asyncio.Task[object]) -> None:
        """Cancel the agent, and go on without it where it does not let itself be cancelled."""
        if playing.done():
            return
        playing.cancel()
        _, pending = await asyncio.wait({playing}, timeout=CANCEL_SECONDS)
        if pending:
            log.warning("%s: the agent goes on after it was cancelled", self.record.id)

    def _answered(self, answer: object, session: RecordingSession) -> RolloutResult:
        if answer is not None and not isinstance(answer, str):
            raise AgentError(
                f"the agent returned {type(answer).__name__}; it has to return the answer as text, "
                "or None"
            )
        if answer is None or not answer.strip():
            return RolloutResult(session.limit or "no_answer")
        marked = self.context.scoring.extract_answer(answer, self.task.answer_schema)
        return RolloutResult("answered", answer.strip() if marked is None else marked)

    def _out_of_time(self) -> RolloutResult:
        if not self.turns:
            seconds = self.context.rollout.rollout_timeout_seconds
            raise AgentError(
                f"the agent had no reply of the policy within rollout_timeout_seconds={seconds:g}"
            )
        return RolloutResult("time_limit")

    def _after_error(self, error: BaseException, session: RecordingSession) -> RolloutResult:
        self._error = f"agent_error: {type(error).__name__}: {error}"
        if session.limit is not None:
            return RolloutResult(session.limit)
        if not self.turns or any(isinstance(e, _INFRASTRUCTURE) for e in _behind(error)):
            raise AgentError(f"the agent failed ({type(error).__name__}: {error})") from error
        log.info("%s: the agent raised %s: %s", self.record.id, type(error).__name__, error)
        return RolloutResult("agent_error")


async def _in_thread(agent: AgentFunction, task: MCPTask, endpoint: AgentEndpoint) -> object:
    """Call a plain function in a daemon thread of its own.

    Of its own, because as many rollouts may block at once as there are slots; a daemon, because a
    thread cannot be ended and must not hold up the end of the process.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[object] = loop.create_future()

    def settle(result: object, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result: object = None
        failure: BaseException | None = None
        try:
            result = agent(task, endpoint)
        except Exception as error:  # noqa: BLE001
            # Whatever it raises belongs to the rollout, not to this thread.
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name=f"agent {task.id}", daemon=True).start()
    return await done


def _behind(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and everything that led to it."""
    pending, seen = [error], set()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
        pending += [e for e in (current.__cause__, current.__context__) if e is not None]
