"""An MCP server that needs more of its client than calls: `python asking_server.py [PORT]`.

`order` asks the user; `order_nothing` asks for what has no default; `think` needs a language model,
and `find` asks for roots without asking whether there are any; `grow` adds a tool; `report` says
more in its structured content than in its text; `look_up` answers with a link; `work` becomes a task
where the client takes tasks; `work_badly` is a task that fails, `work_asking` and `work_thinking` are
some that ask a user and a language model, and `work_as` one whose handle and state its arguments give.
Without a port it speaks over stdio. It gives instructions.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import uvicorn
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.elicitation import AcceptedElicitation, ElicitationResult
from mcp.server.extension import Extension, MethodBinding
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resolve import Elicit, Resolve, Sample
from mcp.types import (
    CallToolRequestParams,
    CallToolResult,
    CreateMessageResult,
    InputRequiredResult,
    ListRootsRequest,
    ListRootsResult,
    RequestParams,
    ResourceLink,
    SamplingMessage,
    TextContent,
)
from pydantic import BaseModel

INSTRUCTIONS = "Prices are in euro."
NUM_REGROWN = 900


class Color(BaseModel):
    """A form whose field has a default."""

    color: str = "red"


class Name(BaseModel):
    """A form without one."""

    name: str


class TaskParams(RequestParams):
    """Names a task."""

    task_id: str
    input_responses: dict[str, Any] | None = None


class Tasks(Extension):
    """Turns calls of `work...` into tasks that last a second."""

    identifier = "io.modelcontextprotocol/tasks"

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._begun: dict[str, tuple[str, float]] = {}
        self._answers: dict[str, Any] = {}
        self._states: list[dict[str, Any]] = []
        self.cancelled: list[str] = []

    def methods(self) -> Sequence[MethodBinding]:
        return [
            MethodBinding("tasks/get", TaskParams, self._get),
            MethodBinding("tasks/update", TaskParams, self._update),
            MethodBinding("tasks/cancel", TaskParams, self._cancel),
        ]

    async def intercept_tool_call(
        self,
        params: CallToolRequestParams,
        ctx: ServerRequestContext[Any, Any],
        call_next: CallNext,
    ) -> HandlerResult:
        if not params.name.startswith("work"):
            return await call_next(ctx)
        if params.name == "work_as":
            given: dict[str, dict[str, Any]] = params.arguments or {}
            self._states.append(given["state"])
            return given["handle"]
        name = f"task-{next(self._numbers)}"
        self._begun[name] = (params.name, time.monotonic())
        return {"resultType": "task", **self._state(name, "working")}

    def _state(self, name: str, status: str) -> dict[str, Any]:
        now = "2026-11-22T00:00:00Z"
        times = {"createdAt": now, "lastUpdatedAt": now, "ttlMs": None, "pollIntervalMs": 50}
        return {"taskId": name, "status": status, **times}

    async def _get(self, _ctx: object, params: TaskParams) -> HandlerResult:
        if params.task_id not in self._begun:
            return self._states[-1]
        kind, begun = self._begun[params.task_id]
        if kind == "work_for_ever" or time.monotonic() - begun < 1.2:
            return self._state(params.task_id, "working")
        if kind == "work_badly":
            error = {"code": -32000, "message": "the kiln broke"}
            return {**self._state(params.task_id, "failed"), "error": error}
        if kind == "work_asking" and params.task_id not in self._answers:
            form = {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]}
            asked = {"message": "How many?", "requestedSchema": form, "mode": "form"}
            request = {"method": "elicitation/create", "params": asked}
            return {
                **self._state(params.task_id, "input_required"),
                "inputRequests": {"q": request},
            }
        if kind == "work_thinking":
            messages = [{"role": "user", "content": {"type": "text", "text": "Why?"}}]
            sampling = {"messages": messages, "maxTokens": 9}
            request = {"method": "sampling/createMessage", "params": sampling}
            return {
                **self._state(params.task_id, "input_required"),
                "inputRequests": {"q": request},
            }
        text = f"fired {self._answers.get(params.task_id, '')}".strip()
        result = {"content": [{"type": "text", "text": text}]}
        return {**self._state(params.task_id, "completed"), "result": result}

    async def _update(self, _ctx: object, params: TaskParams) -> HandlerResult:
        if params.task_id in self._begun:
            self._answers[params.task_id] = (params.input_responses or {})["q"]["action"]
        return {}

    async def _cancel(self, _ctx: object, params: TaskParams) -> HandlerResult:
        self.cancelled.append(params.task_id)
        return {}


tasks = Tasks()
numbers = itertools.count()
server = MCPServer("asking", instructions=INSTRUCTIONS, extensions=[tasks], log_level="CRITICAL")


def ask_color() -> Elicit[Color]:
    return Elicit("Which color?", Color)


def ask_name() -> Elicit[Name]:
    return Elicit("What is your name?", Name)


def ask_model() -> Sample:
    said = TextContent(type="text", text="Why?")
    return Sample([SamplingMessage(role="user", content=said)], max_tokens=9)


def told(answer: ElicitationResult[Any]) -> str:
    return str(answer.data) if isinstance(answer, AcceptedElicitation) else answer.action


@server.tool()
def order(answer: Annotated[ElicitationResult[Color], Resolve(ask_color)]) -> str:
    return told(answer)


@server.tool()
def order_nothing(answer: Annotated[ElicitationResult[Name], Resolve(ask_name)]) -> str:
    return told(answer)


@server.tool()
def think(thought: Annotated[CreateMessageResult, Resolve(ask_model)]) -> str:
    return str(thought)


@server.tool(structured_output=False)
async def find(context: Context) -> CallToolResult | InputRequiredResult:
    if context.request_context.protocol_version >= "2026":
        return InputRequiredResult(input_requests={"roots": ListRootsRequest()})
    await context.session.send_request(ListRootsRequest(), ListRootsResult)
    return CallToolResult(content=[])


@server.tool()
async def grow(context: Context) -> str:
    """Add a tool and tell so, as either generation does."""

    def shrink(size: int) -> int:
        """Make it smaller."""
        return size - 1

    server.add_tool(shrink, name=f"shrink_{next(numbers)}")
    await context.notify_tools_changed()
    if context.request_context.protocol_version < "2026":
        await context.session.send_tool_list_changed()
    return "grown"


@server.tool()
async def regrow(context: Context) -> str:
    """Put 900 new tools in place of those before."""
    first = next(numbers) * NUM_REGROWN
    for number in range(first, first + NUM_REGROWN):
        if number >= NUM_REGROWN and first:
            with suppress(ToolError):
                server.remove_tool(f"again_{number - NUM_REGROWN}")
        server.add_tool(report, name=f"again_{number}")
    await context.notify_tools_changed()
    if context.request_context.protocol_version < "2026":
        await context.session.send_tool_list_changed()
    return "grown again"


@server.tool(structured_output=False)
def report() -> CallToolResult:
    return CallToolResult(
        content=[TextContent(type="text", text="2 lamps")], structured_content={"price": 21}
    )


@server.tool(structured_output=False)
def look_up() -> CallToolResult:
    link = ResourceLink(type="resource_link", name="page", uri="shop://lamps")
    lost = ResourceLink(type="resource_link", name="lost", uri="shop://none")
    return CallToolResult(content=[link, lost])


@server.resource("shop://lamps")
def lamps() -> str:
    return "The lamp costs 21."


@server.tool(structured_output=False)
def work() -> str:
    return "at once"


@server.tool(structured_output=False)
def work_badly() -> str:
    return "at once"


@server.tool(structured_output=False)
def work_asking() -> str:
    return "at once"


@server.tool(structured_output=False)
def work_thinking() -> str:
    return "at once"


@server.tool(structured_output=False)
def work_for_ever() -> str:
    return "at once"


@server.tool(structured_output=False)
def work_as(handle: dict[str, Any], state: Any) -> str:
    return f"at once {handle} {state}"


@server.tool()
def cancelled() -> str:
    return ",".join(tasks.cancelled)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        uvicorn.run(
            server.streamable_http_app(),
            host="127.0.0.1",
            port=int(sys.argv[1]),
            log_level="critical",
        )
    else:
        server.run("stdio")
