"""The worker: a process that runs the user's agent and reward in the user's own interpreter.

It reads one JSON request a line from stdin and writes one JSON reply a line, in any order. What
the user's code prints goes to stderr. It ends when its stdin does.

    {"id": 1, "run": {task}, "endpoint": {...}}
    {"id": 2, "reward": {keyword arguments}}      {"id": 1, "cancel": true}
    -> {"id": 1, "result": ...}    {"id": 1, "error": "...", "lost": false}
"""

import asyncio
import contextlib
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, TextIO

from agentrl.errors import AgentError, AgentRLError, UserCodeError
from agentrl.integrations.agent_worker.description import FunctionAgent, parse_description
from agentrl.integrations.agent_worker.references import load_object
from agentrl.integrations.aworld.building import build, run_task
from agentrl.runtime.loop_watch import ADVICE_FOR_AGENTS, LoopWatch
from agentrl.schema import AgentResult, GroundTruth, MCPTask
from agentrl.schema.agent_endpoint import AgentEndpoint

_THREADS = 256
"""Plain functions that may run at the same time; they mostly wait for the model."""


class AgentWorker:
    """Runs the described agent, and calls the reward function."""

    def __init__(self, description: dict[str, Any] | None, reward: str | None) -> None:
        """Load what is named.

        Raises:
            ConfigError: it cannot be imported.
        """
        self._description = None if description is None else parse_description(description)
        self._agent: Any = None
        if isinstance(self._description, FunctionAgent):
            self._agent = load_object(self._description.reference, "agent")
        self._reward = None if reward is None else load_object(reward, "reward_func")

    async def run(self, task: dict[str, Any], endpoint: AgentEndpoint) -> AgentResult:
        """Run the agent on a task.

        Raises:
            AgentError: what it returned is no answer, reward or figure.
        """
        returned = await self._returned(task, endpoint)
        try:
            return AgentResult.of(returned)
        except ValueError as error:
            raise AgentError(str(error)) from None

    async def _returned(self, task: dict[str, Any], endpoint: AgentEndpoint) -> object:
        question = MCPTask.model_validate(task)
        if self._description is None:
            raise AgentRLError("no agent was given to this worker")
        if not isinstance(self._description, FunctionAgent):
            return await run_task(build(self._description, endpoint), question.query)
        if self._description.kind == "loop":
            agents = self._agent(endpoint).build_agents()
            agents = await agents if inspect.isawaitable(agents) else agents
            return await run_task(agents, question.query)
        returned = await _called(self._agent, question, endpoint)
        return returned if isinstance(returned, AgentResult | None) else str(returned)

    async def reward(self, arguments: dict[str, Any]) -> float:
        """Return the reward of an answer."""
        assert self._reward is not None, "no request of this kind is made without a function"
        positional = arguments.pop("positional", ())
        if positional:
            answer, truth = positional
            positional = (answer, GroundTruth.model_validate(truth))
        return float(await _called(self._reward, *positional, **arguments))


async def _called(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **keywords)
    result = await asyncio.to_thread(function, *arguments, **keywords)
    return await result if inspect.isawaitable(result) else result


async def serve(worker: AgentWorker, replies: TextIO) -> None:
    """Answer requests until stdin ends."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="agent"))
    requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    threading.Thread(target=_read, args=(loop, requests), daemon=True).start()
    with LoopWatch("the agents' event loop", ADVICE_FOR_AGENTS).watching(loop):
        await _serve(worker, requests, replies)


async def _serve(
    worker: AgentWorker, requests: "asyncio.Queue[dict[str, Any] | None]", replies: TextIO
) -> None:
    running: dict[int, asyncio.Task[None]] = {}
    while (request := await requests.get()) is not None:
        number = request.pop("id")
        if request.pop("cancel", False):
            if number in running:
                running[number].cancel()
            continue
        running[number] = asyncio.create_task(_answer(worker, number, request, replies))
        running[number].add_done_callback(partial(_forget, running, number))
    for task in list(running.values()):
        task.cancel()


def _forget(
    running: dict[int, "asyncio.Task[None]"], number: int, _task: "asyncio.Task[None]"
) -> None:
    del running[number]


def _read(
    loop: asyncio.AbstractEventLoop, requests: "asyncio.Queue[dict[str, Any] | None]"
) -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(requests.put_nowait, json.loads(line))
    with contextlib.suppress(RuntimeError):  # the loop is closed already
        loop.call_soon_threadsafe(requests.put_nowait, None)


async def _answer(
    worker: AgentWorker, number: int, request: dict[str, Any], replies: TextIO
) -> None:
    try:
        if "reward" in request:
            reply: dict[str, Any] = {"result": await worker.reward(request["reward"])}
        else:
            endpoint = AgentEndpoint(**request["endpoint"])
            reply = {"result": asdict(await worker.run(request["run"], endpoint))}
    except asyncio.CancelledError:
        return
    except Exception as error:  # noqa: BLE001  (whatever the user's code raises is a reply)
        reply = {"error": f"{type(error).__name__}: {error}", "lost": _is_infrastructure(error)}
    replies.write(json.dumps({"id": number, **reply}) + "\n")
    replies.flush()


def _is_infrastructure(error: BaseException) -> bool:
    """Return whether something other than the user's code failed: then nothing is scored."""
    cause: BaseException | None = error
    while cause is not None:
        infrastructure = isinstance(cause, AgentRLError | ConnectionError | TimeoutError)
        if infrastructure and not isinstance(cause, UserCodeError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def main() -> int:
    """Serve until stdin ends; the argument is JSON that names what to load."""
    settings = json.loads(sys.argv[1])
    # Frameworks print to stdout, which carries our replies: from here on, that goes to stderr.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        worker = AgentWorker(settings["agent"], settings["reward"])
    except AgentRLError as error:
        replies.write(json.dumps({"id": 0, "error": str(error), "lost": True}) + "\n")
        replies.flush()
        return 2
    asyncio.run(serve(worker, replies))
    # Threads of the user's code that still run must not keep the process alive.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
