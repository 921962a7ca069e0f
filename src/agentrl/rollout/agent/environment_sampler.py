"""Environments as samplers: the environment's own process plays a task, and its calls are recorded."""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Self

from agentrl.config.sections import DataSection
from agentrl.environments import EnvironmentProcess, EnvironmentUri
from agentrl.errors import AgentError
from agentrl.rollout.agent.agent_loading import AgentFunction
from agentrl.rollout.agent.agent_sampler import AgentEndpointServer, AgentSampler
from agentrl.rollout.agent.recording import RecordingSession
from agentrl.rollout.async_sampler import RolloutResult
from agentrl.rollout.context import RolloutContext
from agentrl.schema import AgentResult, EnvironmentTask, MCPTask, Record
from agentrl.schema.agent_endpoint import AgentEndpoint


class EnvironmentSampler(AgentSampler):
    """Runs an environment on one of its tasks; the reward that it gives is the score.

    An environment that fails, or is still at work when the rollout's time is up, ends the attempt
    without a score: neither says anything of the policy. The time begins when it is set up.
    """

    def __init__(
        self,
        task: EnvironmentTask,
        record: Record,
        context: RolloutContext,
        *,
        set_up: Callable[[], Awaitable[None]],
        agent: AgentFunction,
        endpoints: AgentEndpointServer,
    ) -> None:
        super().__init__(task, record, context, agent=agent, endpoints=endpoints)
        self._set_up = set_up

    async def run(self) -> RolloutResult:
        """Set the environment up, then run it to its end, or to the end of its time."""
        await self._set_up()
        limit = self.context.rollout.rollout_timeout_seconds
        self.deadline = self.context.servers.clock.now() + limit
        return await super().run()

    def _out_of_time(self, session: RecordingSession) -> RolloutResult:
        if not session.was_asked_last:
            raise AgentError(
                f"{self._name} was at work when the rollout's time was up (--rollout_timeout_seconds "
                f"{self.context.rollout.rollout_timeout_seconds:g})"
            )
        return super()._out_of_time(session)


class EnvironmentProcesses:
    """The environments of a sampler process, each started with its first task.

    Args:
        section: which interpreter runs them, and which variables they get.
        endpoints: where they reach the policy.
    """

    def __init__(self, section: DataSection, endpoints: AgentEndpointServer) -> None:
        self._section = section
        self._endpoints = endpoints
        self._processes: dict[str, EnvironmentProcess] = {}

    @classmethod
    @contextlib.contextmanager
    def open(cls, section: DataSection, endpoints: AgentEndpointServer) -> Iterator[Self]:
        """Keep the processes until the context ends."""
        opened = cls(section, endpoints)
        try:
            yield opened
        finally:
            for process in opened._processes.values():
                process.close()

    def sampler(
        self, task: EnvironmentTask, record: Record, context: RolloutContext
    ) -> EnvironmentSampler:
        """Return what runs a task; a `MakeSampler` for environments.

        Args:
            task: names its environment, with arguments and row.
            record: the claimed slot.
            context: clients and settings of the process.
        """

        async def set_up() -> None:
            await self.process_of(task).ready()

        async def play(_: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
            return await self.process_of(task).play(task.row, endpoint)

        play.__name__ = task.env_id
        return EnvironmentSampler(
            task, record, context, set_up=set_up, agent=play, endpoints=self._endpoints
        )

    def process_of(self, task: EnvironmentTask) -> EnvironmentProcess:
        """Return the process that plays a task, started if it does not run."""
        uri = EnvironmentUri.of(task)
        key = repr(uri)
        process = self._processes.get(key)
        if process is None or not process.is_alive:
            if process is not None:
                process.close()
            process = self._processes[key] = EnvironmentProcess(uri, self._section)
        return process
