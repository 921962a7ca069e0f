"""Requests of MCP servers to their client, and calls that they continue as tasks.

Input: a server's policy. Output: the handlers of the SDK's client. A rollout has no user: a
question to the user (elicitation) is declined and logged once, unless the server's policy accepts
the form's defaults. Sampling and roots are not supported; a request for them gets an error and is
logged once. A call that becomes a task (an extension of protocol 2026-07-28) is polled to
completion within the call's timeout.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Literal

from mcp import MCPError
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.client.session import ClientRequestContext
from mcp.types import (
    INTERNAL_ERROR,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    CallToolResult,
    ElicitRequestFormParams,
    ElicitRequestParams,
    ElicitResult,
    ErrorData,
    InputRequests,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCRequest,
    JSONRPCResponse,
    Request,
    RequestParams,
    Result,
    TextContent,
)
from pydantic import ValidationError

from agentrl.runtime.printable import one_line
from agentrl.tools.servers.server_config import McpServer

logger = logging.getLogger(__name__)

_FIRST_POLL_SECONDS = 0.1
_MIN_POLL_SECONDS = 0.02
_MAX_POLL_SECONDS = 5.0
_CANCEL_SECONDS = 2.0
_MAX_QUESTION_CHARS = 200
_UNSUPPORTED = {"sampling": "a language model", "roots": "roots"}
"""Capabilities that samplers lack, and their description in the log."""

still_working: ContextVar[Callable[[], None] | None] = ContextVar("still_working", default=None)
"""Called whenever the task of the current call reports that it is still running."""


class ServerQuestions:
    """Answers the requests of one server on all connections to it."""

    def __init__(self, name: str, server: McpServer) -> None:
        self._name = name
        self._accepts = server.elicitation == "accept"
        self._logged: set[str] = set()

    async def answer(
        self, context: object, params: ElicitRequestParams
    ) -> ElicitResult | ErrorData:
        """Return the form's defaults if the policy accepts and they suffice; else decline."""
        content = _defaults(params) if self._accepts else None
        if content is not None:
            return ElicitResult(action="accept", content=content)
        if self._is_first("elicitation"):
            logger.warning(
                "MCP server %r asks the user %r: declined, like all its later requests (logged once); "
                'set "elicitation": "accept" in mcpServers to answer with the defaults of forms',
                self._name,
                one_line(params.message, _MAX_QUESTION_CHARS),
            )
        return ElicitResult(action="decline")

    def note(self, message: JSONRPCMessage) -> None:
        """Log once that a message requires an unsupported capability; the SDK answers with an error."""
        for capability in _needed_capabilities(message):
            if capability in _UNSUPPORTED and self._is_first(capability):
                logger.warning(
                    "MCP server %r requests %s (%s): unsupported, answered with an error (logged "
                    "once)",
                    self._name,
                    _UNSUPPORTED[capability],
                    capability,
                )

    def _is_first(self, capability: str) -> bool:
        is_first = capability not in self._logged
        self._logged.add(capability)
        return is_first


def _needed_capabilities(message: JSONRPCMessage) -> Iterator[str]:
    """Yield the client capabilities that a message requires, in the forms of all protocols."""
    if isinstance(message, JSONRPCRequest):
        yield message.method.partition("/")[0]
    elif isinstance(message, JSONRPCResponse):
        requests = message.result.get("inputRequests")
        for request in requests.values() if isinstance(requests, Mapping) else ():
            yield (
                str(request.get("method")).partition("/")[0] if isinstance(request, Mapping) else ""
            )
    elif (
        isinstance(message, JSONRPCError)
        and message.error.code == MISSING_REQUIRED_CLIENT_CAPABILITY
        and isinstance(message.error.data, Mapping)
    ):
        required = message.error.data.get("requiredCapabilities")
        yield from required if isinstance(required, Mapping) else ()


def _defaults(params: ElicitRequestParams) -> dict[str, Any] | None:
    """Return the default of every field of a form; None if a required field has none."""
    if not isinstance(params, ElicitRequestFormParams):
        return None  # a request to visit an address
    schema = params.requested_schema
    fields = schema.get("properties")
    if not isinstance(fields, Mapping):
        return None
    defaults = {
        name: field["default"]
        for name, field in fields.items()
        if isinstance(field, Mapping) and "default" in field
    }
    if not all(isinstance(value, str | int | float) for value in defaults.values()):
        return None
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return None
    return defaults if defaults.keys() >= set(required) else None


class TaskHandle(Result):
    """The reply of a server in place of a slow result."""

    result_type: Literal["task"]
    task_id: str
    poll_interval_ms: int | None = None


class TaskState(Result):
    """The current state of a task on the server."""

    status: Literal["working", "input_required", "completed", "failed", "cancelled"]
    status_message: str | None = None
    poll_interval_ms: int | None = None
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    input_requests: InputRequests | None = None


class TaskParams(RequestParams):
    """Names a task."""

    task_id: str


class TaskUpdateParams(TaskParams):
    """Answers the requests of a task."""

    input_responses: dict[str, Any]


class GetTask(Request[TaskParams, Literal["tasks/get"]]):
    """Requests the state of a task."""

    method: Literal["tasks/get"] = "tasks/get"
    params: TaskParams
    name_param: ClassVar[str | None] = "taskId"


class UpdateTask(Request[TaskUpdateParams, Literal["tasks/update"]]):
    """Answers the requests of a task."""

    method: Literal["tasks/update"] = "tasks/update"
    params: TaskUpdateParams
    name_param: ClassVar[str | None] = "taskId"


class CancelTask(Request[TaskParams, Literal["tasks/cancel"]]):
    """Cancels a task whose result is no longer awaited."""

    method: Literal["tasks/cancel"] = "tasks/cancel"
    params: TaskParams
    name_param: ClassVar[str | None] = "taskId"


class PolledTasks(ClientExtension):
    """The extension that lets servers turn a call into a task."""

    identifier = "io.modelcontextprotocol/tasks"

    def claims(self) -> Sequence[ResultClaim[Any]]:
        """Handle results that are tasks."""
        return (ResultClaim(result_type="task", model=TaskHandle, resolve=_poll_to_completion),)


async def _poll_to_completion(handle: TaskHandle, context: ClaimContext) -> CallToolResult:
    """Poll a task to completion; cancel it when its call is abandoned.

    Raises:
        MCPError: the task failed, requests an unsupported capability, or is unknown to the server.
    """
    params = TaskParams(task_id=handle.task_id)
    pause = _FIRST_POLL_SECONDS
    interval_ms = handle.poll_interval_ms
    try:
        while True:
            await asyncio.sleep(_poll_seconds(pause, interval_ms))
            pause *= 2
            state = await context.session.send_request(GetTask(params=params), TaskState)
            interval_ms = state.poll_interval_ms
            if state.status == "input_required":
                await _answer_all(handle.task_id, state, context)
            elif state.status != "working":
                return _outcome(state)
            report = still_working.get()
            if report is not None:
                report()
    except asyncio.CancelledError:
        await _cancel(params, context)
        raise


def _poll_seconds(pause: float, interval_ms: int | None) -> float:
    """Return the pause before the next poll of a task: its server's interval, within limits."""
    if interval_ms is None:
        return min(pause, _MAX_POLL_SECONDS)
    # Bounded before the division: JSON integers may exceed the range of a float.
    return max(_MIN_POLL_SECONDS, min(interval_ms, round(_MAX_POLL_SECONDS * 1000)) / 1000)


async def _answer_all(task_id: str, state: TaskState, context: ClaimContext) -> None:
    """Answer a task's requests like those of calls; cancel a task that needs an unsupported capability.

    Raises:
        MCPError: a request needs an unsupported capability.
    """
    answers = {}
    for key, request in (state.input_requests or {}).items():
        request_context = ClientRequestContext(session=context.session, request_id=key)
        answer = await context.session.dispatch_input_request(request_context, request)
        if isinstance(answer, ErrorData):
            await _cancel(TaskParams(task_id=task_id), context)
            raise MCPError.from_error_data(answer)
        answers[key] = answer.model_dump(by_alias=True, mode="json", exclude_none=True)
    update = TaskUpdateParams(task_id=task_id, input_responses=answers)
    await context.session.send_request(UpdateTask(params=update), Result)


async def _cancel(params: TaskParams, context: ClaimContext) -> None:
    with contextlib.suppress(MCPError, TimeoutError, ValidationError):
        async with asyncio.timeout(_CANCEL_SECONDS):
            await context.session.send_request(CancelTask(params=params), Result)


def _outcome(state: TaskState) -> CallToolResult:
    if state.status == "completed":
        return CallToolResult.model_validate(state.result or {})
    if state.status == "failed":
        error = state.error or {}
        message = error.get("message") or state.status_message or "the task failed"
        code = error.get("code")
        raise MCPError(code if isinstance(code, int) else INTERNAL_ERROR, str(message))
    text = f"the task was cancelled: {state.status_message or 'no reason given'}"
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)
