"""What MCP servers ask of their client, and calls that they carry on as tasks.

In: a server's policy. Out: what the SDK's client needs to answer. A rollout has no user: a question to
one (elicitation) is declined, and said once, unless the server's policy accepts the form's own
defaults. Requests for a language model (sampling) and for roots are not offered at all. A call that
becomes a task (the extension of protocol 2026-07-28) is polled to its end within the call's time.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Literal

from mcp import MCPError
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.types import (
    INTERNAL_ERROR,
    CallToolResult,
    ElicitRequestFormParams,
    ElicitRequestParams,
    ElicitResult,
    ErrorData,
    Request,
    RequestParams,
    Result,
    TextContent,
)
from pydantic import ValidationError

from agentrl.runtime.printable import one_line
from agentrl.tools.server_config import McpServer

logger = logging.getLogger(__name__)

_FIRST_POLL_SECONDS = 0.1
_MIN_POLL_SECONDS = 0.02
_MAX_POLL_SECONDS = 5.0
_CANCEL_SECONDS = 2.0
_MAX_SAID_CHARS = 200

still_working: ContextVar[Callable[[], None] | None] = ContextVar("still_working", default=None)
"""Called whenever the task behind the current call says that it goes on."""


class ServerQuestions:
    """Answers the questions that one server has for a user."""

    def __init__(self, name: str, server: McpServer) -> None:
        self._name = name
        self._accepts = server.elicitation == "accept"
        self._has_said = False

    async def answer(
        self, context: object, params: ElicitRequestParams
    ) -> ElicitResult | ErrorData:
        """Return the form's defaults where the policy says so and they suffice; else decline."""
        content = _defaults(params) if self._accepts else None
        if content is not None:
            return ElicitResult(action="accept", content=content)
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "MCP server %r asks the user %r: declined, as all of its questions are (said once); "
                '"elicitation": "accept" in mcpServers answers with a form\'s own defaults',
                self._name,
                one_line(params.message, _MAX_SAID_CHARS),
            )
        return ElicitResult(action="decline")


def _defaults(params: ElicitRequestParams) -> dict[str, Any] | None:
    """Return the default of every field of a form; None where a required one has none."""
    if not isinstance(params, ElicitRequestFormParams):
        return None  # an address that somebody would have to visit
    schema = params.requested_schema
    fields = schema.get("properties")
    if not isinstance(fields, Mapping):
        return None
    given = {
        name: field["default"]
        for name, field in fields.items()
        if isinstance(field, Mapping) and "default" in field
    }
    if not all(isinstance(value, str | int | float) for value in given.values()):
        return None
    required = schema.get("required") or ()
    return given if all(name in given for name in required) else None


class TaskHandle(Result):
    """What a server returns instead of a result that will take long."""

    result_type: Literal["task"]
    task_id: str
    poll_interval_ms: int | None = None


class TaskState(Result):
    """A task as the server sees it now."""

    status: Literal["working", "input_required", "completed", "failed", "cancelled"]
    status_message: str | None = None
    poll_interval_ms: int | None = None
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    input_requests: dict[str, Any] | None = None


class TaskParams(RequestParams):
    """Names a task."""

    task_id: str


class TaskUpdateParams(TaskParams):
    """Answers what a task asks."""

    input_responses: dict[str, Any]


class GetTask(Request[TaskParams, Literal["tasks/get"]]):
    """Asks for the state of a task."""

    method: Literal["tasks/get"] = "tasks/get"
    params: TaskParams
    name_param: ClassVar[str | None] = "taskId"


class UpdateTask(Request[TaskUpdateParams, Literal["tasks/update"]]):
    """Answers what a task asks."""

    method: Literal["tasks/update"] = "tasks/update"
    params: TaskUpdateParams
    name_param: ClassVar[str | None] = "taskId"


class CancelTask(Request[TaskParams, Literal["tasks/cancel"]]):
    """Tells that nobody waits for a task any longer."""

    method: Literal["tasks/cancel"] = "tasks/cancel"
    params: TaskParams
    name_param: ClassVar[str | None] = "taskId"


class PolledTasks(ClientExtension):
    """The extension by which servers may turn a call into a task."""

    identifier = "io.modelcontextprotocol/tasks"

    def claims(self) -> Sequence[ResultClaim[Any]]:
        """Take over the results that are tasks."""
        return (ResultClaim(result_type="task", model=TaskHandle, resolve=_finished),)


async def _finished(handle: TaskHandle, context: ClaimContext) -> CallToolResult:
    """Poll a task to its end; a call that nobody waits for any longer is cancelled.

    Raises:
        MCPError: the task failed, or the server does not know it.
    """
    params = TaskParams(task_id=handle.task_id)
    pause = _FIRST_POLL_SECONDS
    asked_for = handle.poll_interval_ms
    try:
        while True:
            wanted = pause if asked_for is None else max(_MIN_POLL_SECONDS, asked_for / 1000)
            await asyncio.sleep(min(wanted, _MAX_POLL_SECONDS))
            pause *= 2
            state = await context.session.send_request(GetTask(params=params), TaskState)
            asked_for = state.poll_interval_ms
            if state.status == "input_required":
                await _decline_all(handle.task_id, state, context)
            elif state.status != "working":
                return _outcome(state)
            heard = still_working.get()
            if heard is not None:
                heard()
    except asyncio.CancelledError:
        with contextlib.suppress(MCPError, TimeoutError, ValidationError):
            async with asyncio.timeout(_CANCEL_SECONDS):
                await context.session.send_request(CancelTask(params=params), Result)
        raise


async def _decline_all(task_id: str, state: TaskState, context: ClaimContext) -> None:
    """Decline what a task asks of a user; it goes on without."""
    answers = {key: {"action": "decline"} for key in state.input_requests or {}}
    update = TaskUpdateParams(task_id=task_id, input_responses=answers)
    await context.session.send_request(UpdateTask(params=update), Result)


def _outcome(state: TaskState) -> CallToolResult:
    if state.status == "completed":
        return CallToolResult.model_validate(state.result or {})
    if state.status == "failed":
        error = state.error or {}
        message = error.get("message") or state.status_message or "the task failed"
        code = error.get("code")
        raise MCPError(code if isinstance(code, int) else INTERNAL_ERROR, str(message))
    text = f"the task was cancelled: {state.status_message or 'no reason was given'}"
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)
