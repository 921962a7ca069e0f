"""Environments as rollouts: the environment's own process runs a task, and its calls are recorded."""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Self

from agentrl.config.sections import DataSection
from agentrl.errors import AgentError
from agentrl.plugins.environments import EnvironmentProcess, EnvironmentUri
from agentrl.rollout.agent.agent_loading import AgentFunction
from agentrl.rollout.agent.agent_sampler import AgentEndpointServer, AgentSampler
from agentrl.rollout.agent.recording import RecordingSession
from agentrl.rollout.async_sampler import RolloutResult
from agentrl.rollout.context import RolloutContext
from agentrl.schema import AgentResult, EnvironmentTask, MCPTask, Record
from agentrl.schema.agent_endpoint import AgentEndpoint


class EnvironmentSampler(AgentSampler):
    """Runs an environment on one of its tasks; the environment's reward is the score.

    An environment that fails or times out ends the attempt without a score, because neither reveals
    anything about the policy. The time starts once the environment is set up.
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
        """Set up the environment, then run it until it finishes or times out."""
        await self._set_up()
        limit = self.context.rollout.rollout_timeout_seconds
        self.deadline = self.context.servers.clock.now() + limit
        return await super().run()

    def _after_timeout(self, session: RecordingSession) -> RolloutResult:
        if not session.is_waiting_for_policy:
            raise AgentError(
                f"{self._name} was still running when the rollout timed out "
                f"(--rollout_timeout_seconds {self.context.rollout.rollout_timeout_seconds:g})"
            )
        return super()._after_timeout(session)


class EnvironmentProcesses:
    """The environments of a sampler process, each started with its first task.

    Args:
        section: their interpreter and the environment variables that they receive.
        endpoints: the policy's endpoints for them.
    """

    def __init__(self, section: DataSection, endpoints: AgentEndpointServer) -> None:
        self._section = section
        self._endpoints = endpoints
        self._processes: dict[str, EnvironmentProcess] = {}

    @classmethod
    @contextlib.contextmanager
    def open(cls, section: DataSection, endpoints: AgentEndpointServer) -> Iterator[Self]:
        """Keep the processes running until the context ends."""
        opened = cls(section, endpoints)
        try:
            yield opened
        finally:
            for process in opened._processes.values():
                process.close()

    def sampler(
        self, task: EnvironmentTask, record: Record, context: RolloutContext
    ) -> EnvironmentSampler:
        """Return the rollout of a task; a `MakeSampler` for environments.

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
        """Return the process that runs a task; start it if necessary."""
        uri = EnvironmentUri.of(task)
        key = repr(uri)
        process = self._processes.get(key)
        if process is None or not process.is_alive:
            if process is not None:
                process.close()
            process = self._processes[key] = EnvironmentProcess(uri, self._section)
        return process
