"""`AgentSampler`: runs a third-party agent as a rollout.

The agent calls the policy through `AgentEndpointServer`, which gives every rollout its own address
and records the calls made there.
"""

import asyncio
import contextlib
import inspect
import logging
import socket
import threading
import traceback
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from agentrl.config.sections import AgentSection
from agentrl.config.user_code import users_place
from agentrl.errors import AgentError, AgentRLError, UserCodeError
from agentrl.inference.dialects.api_server import APIServer
from agentrl.rollout.agent.agent_loading import AgentFunction, is_async, program_ended
from agentrl.rollout.agent.recording import RecordingSession, RolloutCalls
from agentrl.rollout.async_sampler import AsyncSampler, RolloutResult
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.world import score_rollout
from agentrl.schema import AgentResult, MCPTask, Outcome, Record, Score, Seat
from agentrl.schema.agent_endpoint import AgentEndpoint

log = logging.getLogger(__name__)

CANCEL_SECONDS = 5.0
"""How long a cancelled agent may take to finish."""
_INFRASTRUCTURE = (AgentRLError, ConnectionError, TimeoutError, socket.gaierror)


class AgentEndpointServer:
    """Serves the policy to the agents of a sampler process; usually created by `open`."""

    def __init__(self, section: AgentSection, model: str, server: APIServer) -> None:
        self._section = section
        self._model = model
        self._server = server
        self._logged_refusals: set[tuple[Any, ...]] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, section: AgentSection, model: str) -> AsyncIterator["AgentEndpointServer"]:
        """Listen on a free port until the context ends."""
        async with APIServer.open(section.agent_gateway_host) as server:
            log.info("agents reach the policy at %s", server.address)
            yield cls(section, model, server)

    @contextlib.asynccontextmanager
    async def serve(
        self, sampler: AsyncSampler[Any]
    ) -> AsyncIterator[tuple[RecordingSession, AgentEndpoint]]:
        """Record the calls of one rollout until the context ends; yields the endpoint to call."""
        session = RecordingSession(sampler, self._section, self._model, self._logged_refusals)
        async with self._server.serve(session) as endpoint:
            yield session, endpoint


class AgentSampler(AsyncSampler[MCPTask]):
    """Runs an agent on a task and records its calls to the policy.

    The agent's return value is the answer, or contains it in the form of the task's answer schema.
    A reward that it returns (`AgentResult`) replaces the scorer's score. If the agent raises, the
    policy's output is taken as the cause (outcome `agent_error`, score 0). The attempt ends without
    a score instead if the cause was an infrastructure failure or a call that the endpoint refused,
    or if the policy was never called.
    """

    def __init__(
        self,
        task: MCPTask,
        record: Record,
        context: RolloutContext,
        *,
        agent: AgentFunction,
        endpoints: AgentEndpointServer,
    ) -> None:
        super().__init__(task, record, context)
        self._agent = agent
        self._endpoints = endpoints
        self._name = getattr(agent, "__name__", type(agent).__name__)
        self._error = ""

    async def run(self) -> RolloutResult:
        """Run the agent until it finishes or times out."""
        self.context.check_scorer(self.task)
        async with self._endpoints.serve(self) as (session, endpoint):
            calls = session.calls
            running = asyncio.create_task(self._run_agent(endpoint))
            try:
                with contextlib.suppress(TimeoutError):
                    async with self.context.servers.clock.timeout_at(self.deadline):
                        await asyncio.wait({running})
            finally:
                in_time = running.done()
                await self._stop_agent(running)
        # Read even if another failure is raised: asyncio reports an exception that nobody read.
        error = _error_of(running) if in_time else None
        if calls.failure is not None:
            raise calls.failure
        if calls.refusal is not None and calls.limit is None:
            raise AgentError(f"the endpoint refused a call: {calls.refusal}")
        if not in_time:
            return self._after_timeout(calls)
        if error is not None:
            return self._after_error(error, calls)
        return self._after_return(running.result(), calls)

    async def evaluate_record(self, result: RolloutResult) -> Score:
        """Return the agent's reward, or else the score of the task's scorer.

        A rollout with neither scores 0.
        """
        if result.reward is not None and self.context.scorer_of(self.task) == self.task.scorer:
            inputs = {"answer": result.final_answer}
            return Score(
                scorer=self._name, value=result.reward, inputs=inputs, seats_keep_rewards=True
            )
        reason = self._error or result.outcome
        return await score_rollout(self, result, reason)

    async def _run_agent(self, endpoint: AgentEndpoint) -> object:
        returned: object
        try:
            if is_async(self._agent):
                returned = await self._agent(self.task, endpoint)
            else:
                returned = await _in_thread(self._agent, self.task, endpoint)
                if inspect.isawaitable(returned):
                    returned = await returned
        except SystemExit as end:  # asyncio would propagate it to the whole process
            raise program_ended(end) from end
        return returned

    async def _stop_agent(self, running: asyncio.Task[object]) -> None:
        """Cancel the agent; continue without it if it does not finish in time."""
        if running.done():
            return
        running.cancel()
        _, pending = await asyncio.wait({running}, timeout=CANCEL_SECONDS)
        if pending:
            log.warning("%s: the agent is still running after it was cancelled", self.record.id)

    def _after_return(self, returned: object, calls: RolloutCalls) -> RolloutResult:
        try:
            result = AgentResult.of(returned)
        except ValueError as error:
            raise AgentError(str(error)) from None
        if result.error is not None and calls.limit is None:
            raise AgentError(f"the agent ended the attempt: {result.error}")
        if calls.limit is None and not self.turns:
            raise AgentError(
                "the agent returned without calling the policy, so there is nothing to train on; "
                "make it call the model with the base_url and api_key that it is given"
            )
        self.reward_turns(self._rewards_by_turn(result), self._seats_by_turn(result, calls))
        outcome: Outcome = "turns_limit" if result.truncated else "no_answer"
        unanswered = RolloutResult(
            calls.limit or outcome, reward=result.reward, metrics=result.metrics
        )
        answer = (result.answer or "").strip()
        if not answer:
            return unanswered
        extracted = self.context.scoring.extract_answer(answer, self.task.answer_schema)
        return replace(
            unanswered,
            outcome="turns_limit" if result.truncated else "answered",
            final_answer=answer if extracted is None else extracted,
        )

    def _rewards_by_turn(self, result: AgentResult) -> dict[int, float]:
        """Return the reward of each turn by index."""
        steps = tuple(result.step_rewards)
        if len(steps) > len(self.turns):
            raise AgentError(
                f"the agent returned {len(steps)} step_rewards for {len(self.turns)} policy calls"
            )
        return {index: reward for index, reward in enumerate(steps) if reward is not None}

    def _seats_by_turn(self, result: AgentResult, calls: RolloutCalls) -> dict[int, Seat]:
        """Return the seat of each turn by index, with what it earned; nothing without seats."""
        earned = {(seat.name, seat.stint): seat for seat in result.seats}
        if not earned:
            return {}
        keys = {seat: key for key, seat in calls.seats.items()}
        seats: dict[int, Seat] = {}
        for turn in self.turns:
            if turn.seat is None:
                continue
            of_stint = earned.get(keys[turn.seat])
            if of_stint is None:
                raise AgentError(
                    f"the seat {turn.seat.name!r} made calls, but the agent returned no result for "
                    "it; list it in `seats`, with the stint that its calls named"
                )
            update = {"reward": of_stint.reward, "trained": of_stint.trained}
            seats[turn.index] = turn.seat.model_copy(update=update)
        return seats

    def _after_timeout(self, calls: RolloutCalls) -> RolloutResult:
        if not self.turns:
            seconds = self.context.rollout.rollout_timeout_seconds
            raise AgentError(
                f"the agent got no reply from the policy within rollout_timeout_seconds={seconds:g}"
            )
        return RolloutResult("time_limit")

    def _after_error(self, error: BaseException, calls: RolloutCalls) -> RolloutResult:
        self._error = f"agent_error: {type(error).__name__}: {error}{_place_of(error)}"
        if calls.limit is not None:
            return RolloutResult(calls.limit)
        if not self.turns or any(map(_is_infrastructure, _causes(error))):
            raise AgentError(f"the agent failed ({type(error).__name__}: {error})") from error
        log.info("%s: %s", self.record.id, self._error, exc_info=error)
        return RolloutResult("agent_error")


async def _in_thread(agent: AgentFunction, task: MCPTask, endpoint: AgentEndpoint) -> object:
    """Call a plain function in its own daemon thread.

    A thread pool could be exhausted: every rollout of the process may block at the same time. The
    thread is a daemon because it cannot be killed and must not delay the exit of the process.
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

    def call_agent() -> None:
        result: object = None
        failure: BaseException | None = None
        try:
            result = agent(task, endpoint)
        except (StopIteration, KeyboardInterrupt) as error:  # a future or its loop refuses them
            failure = RuntimeError(f"the agent raised {error!r}")
            failure.__cause__ = error
        except BaseException as error:  # noqa: BLE001
            # Raised in the rollout instead of in this thread.
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=call_agent, name=f"agent {task.id}", daemon=True).start()
    return await done


def _error_of(agent: asyncio.Task[object]) -> BaseException | None:
    """Return what an agent that has ended raised; an error of its own if it raised CancelledError."""
    if agent.cancelled():
        return UserCodeError("the agent raised CancelledError; catch it where a task is cancelled")
    return agent.exception()


def _place_of(error: BaseException) -> str:
    """Return ` (file:line)` of the user's code that raised, if that is known."""
    while error.__cause__ is not None:
        error = error.__cause__
    stack = traceback.extract_tb(error.__traceback__)
    return f" ({users_place(stack)})" if stack else ""


def _is_infrastructure(error: BaseException) -> bool:
    return isinstance(error, _INFRASTRUCTURE) and not isinstance(error, UserCodeError)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all its causes."""
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
