"""The worker: a process that runs the user's agent and reward in the user's own interpreter.

Its requests, and replies to them (`RequestServer`):

    {"id": 1, "run": {task}, "endpoint": {...}}    {"id": 2, "reward": {keyword arguments}}
    -> {"id": 1, "result": ...}                    {"id": 1, "error": "...", "lost": false}
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from agentrl.errors import AgentError, AgentRLError, UserCodeError
from agentrl.plugins.integrations.agent_worker.description import FunctionAgent, parse_description
from agentrl.plugins.integrations.agent_worker.references import load_object
from agentrl.plugins.integrations.aworld.building import build, build_with, run_task
from agentrl.rewards.rollout_view import Rollout
from agentrl.runtime.processes.request_server import RequestServer
from agentrl.runtime.telemetry.loop_watch import ADVICE_FOR_AGENTS, LoopWatch
from agentrl.schema import AgentResult, GroundTruth, MCPTask
from agentrl.schema.agent_endpoint import AgentEndpoint


class AgentWorker:
    """Runs the described agent, and calls the reward function."""

    def __init__(self, description: dict[str, Any] | None, reward: str | None) -> None:
        """Load the agent and the reward function."""
        self._description = None if description is None else parse_description(description)
        self._agent: Any = None
        if isinstance(self._description, FunctionAgent):
            self._agent = load_object(self._description.reference, "agent")
        self._reward = None if reward is None else load_object(reward, "reward_func")

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `result` of a request, or an `error`; `lost` means it is to be repeated."""
        try:
            if "reward" in request:
                return {"result": await self._compute_reward(request["reward"])}
            endpoint = AgentEndpoint(**request["endpoint"])
            return {"result": asdict(await self._run_agent(request["run"], endpoint))}
        except Exception as error:  # noqa: BLE001  (the user's code may raise anything)
            return {
                "error": f"{type(error).__name__}: {error}",
                "lost": _is_infrastructure_failure(error),
            }

    async def _run_agent(self, task: dict[str, Any], endpoint: AgentEndpoint) -> AgentResult:
        returned = await self._call_agent(task, endpoint)
        try:
            return AgentResult.of(returned)
        except ValueError as error:
            raise AgentError(str(error)) from None

    async def _call_agent(self, task: dict[str, Any], endpoint: AgentEndpoint) -> object:
        question = MCPTask.model_validate(task)
        if self._description is None:
            raise AgentRLError("this worker has no agent")
        if not isinstance(self._description, FunctionAgent):
            return await run_task(build(self._description, endpoint), question.query)
        if self._description.kind == "loop":
            return await run_task(await build_with(self._agent(endpoint), endpoint), question.query)
        returned = await _call(self._agent, question, endpoint)
        return returned if isinstance(returned, AgentResult | None) else str(returned)

    async def _compute_reward(self, arguments: dict[str, Any]) -> float:
        assert self._reward is not None, "reward requests require a reward function"
        positional = arguments.pop("positional", ())
        if positional:
            answer, truth, *rollout = positional
            seen = map(Rollout.from_json, rollout)
            positional = (answer, GroundTruth.model_validate(truth), *seen)
        return float(await _call(self._reward, *positional, **arguments))


async def _call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **keywords)
    result = await asyncio.to_thread(function, *arguments, **keywords)
    return await result if inspect.isawaitable(result) else result


def _is_infrastructure_failure(error: BaseException) -> bool:
    """Return whether the failure is outside the user's code; the rollout is then not scored."""
    cause: BaseException | None = error
    while cause is not None:
        is_infrastructure = isinstance(cause, AgentRLError | ConnectionError | TimeoutError)
        if is_infrastructure and not isinstance(cause, UserCodeError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def main() -> None:
    """Serve until stdin ends; the argument is JSON that names the agent and reward to load."""
    settings = json.loads(sys.argv[1])
    server = RequestServer(LoopWatch("the agents' event loop", ADVICE_FOR_AGENTS))
    server.run(lambda: AgentWorker(settings["agent"], settings["reward"]).answer)


if __name__ == "__main__":
    main()
