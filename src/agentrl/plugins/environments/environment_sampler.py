"""Environments as rollouts: the environment's own process runs a task, and its calls are recorded."""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import ClassVar, Self

from agentrl.config.sections import DataSection
from agentrl.errors import AgentError
from agentrl.plugins.environments import EnvironmentProcess, EnvironmentUri
from agentrl.rollout.agent.agent_loading import AgentFunction
from agentrl.rollout.agent.agent_sampler import AgentEndpointServer, AgentSampler
from agentrl.rollout.agent.recording import RolloutCalls
from agentrl.rollout.async_sampler import RolloutResult
from agentrl.rollout.context import RolloutContext
from agentrl.schema import AgentResult, EnvironmentTask, MCPTask, Record
from agentrl.schema.agent_endpoint import AgentEndpoint


class EnvironmentSampler(AgentSampler):
    """Runs an environment on one of its tasks; the environment's reward is the score.

    An environment that fails or times out ends the attempt without a score, because neither reveals
    anything about the policy. The time starts once the environment is set up.

    A branch starts from the environment's snapshot, or else runs it from the beginning with the
    parent's replies, and is closed if a prompt differs from the parent's.
    """

    can_branch: ClassVar[bool] = True

    def __init__(
        self,
        task: EnvironmentTask,
        record: Record,
        context: RolloutContext,
        *,
        set_up: Callable[[], Awaitable[None]],
        agent: AgentFunction,
        save: Callable[[AgentEndpoint], Awaitable[bytes | None]],
        endpoints: AgentEndpointServer,
    ) -> None:
        super().__init__(task, record, context, agent=agent, endpoints=endpoints)
        self._set_up = set_up
        self._save = save
        self._endpoint: AgentEndpoint

    async def run(self) -> RolloutResult:
        """Set up the environment, then run it until it finishes or times out."""
        await self._set_up()
        limit = self.context.rollout.rollout_timeout_seconds
        self.deadline = self.context.servers.clock.now() + limit
        return await super().run()

    async def snapshot(self) -> bytes | None:
        """Return the state of the environment, which waits for a reply, if it can be saved."""
        return await self._save(self._endpoint)

    async def _run_agent(self, endpoint: AgentEndpoint) -> object:
        self._endpoint = endpoint
        return await super()._run_agent(endpoint)

    def _after_timeout(self, calls: RolloutCalls) -> RolloutResult:
        if not calls.is_waiting_for_policy:
            raise AgentError(
                f"{self._name} was still running when the rollout timed out "
                f"(--rollout_timeout_seconds {self.context.rollout.rollout_timeout_seconds:g})"
            )
        return super()._after_timeout(calls)


class EnvironmentProcesses:
    """The environments of a sampler process, each started with its first task."""

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
        """Return the rollout of a task; a `MakeSampler` for environments."""
        process = partial(self.process_of, task)

        async def set_up() -> None:
            await process().ready()

        async def play(_: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
            return await process().play(task.row, endpoint, sampler.restored)

        async def save(endpoint: AgentEndpoint) -> bytes | None:
            return await process().snapshot(endpoint)

        play.__name__ = task.env_id
        sampler = EnvironmentSampler(
            *(task, record, context),
            set_up=set_up,
            agent=play,
            save=save,
            endpoints=self._endpoints,
        )
        return sampler

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
