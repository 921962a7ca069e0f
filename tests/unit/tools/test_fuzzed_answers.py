"""Whatever a tool server answers is a result for the model, or a `ToolError` in one line."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from support.fuzzing import TryCases

from agentrl.errors import ToolError
from agentrl.tools import ToolsConfig, connect_tools
from agentrl.tools.mcp_toolbox import McpToolBox

ODD_SERVER = Path(__file__).with_name("odd_server.py")
ConfigFor = Callable[..., ToolsConfig]
Open = Callable[[], "Session"]

texts = st.text(max_size=8) | st.sampled_from(
    ["\ud83d", "\x00", "text", "image/png", "aGk=", "é" * 99]
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
blocks = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "audio", "resource", "resource_link", "video"])},
    optional={
        **dict.fromkeys(("text", "data", "mimeType", "uri", "name"), texts | anything),
        "resource": st.dictionaries(st.sampled_from(["uri", "text", "blob", "mimeType"]), texts),
    },
)
results = anything | st.fixed_dictionaries(
    {},
    optional={
        "content": st.lists(blocks, max_size=3) | anything,
        "isError": st.booleans() | anything,
        "structuredContent": anything,
        "_meta": anything,
    },
)
forms = st.fixed_dictionaries(
    {},
    optional={
        "type": st.just("object") | anything,
        "properties": st.dictionaries(
            texts,
            st.fixed_dictionaries({}, optional={"type": texts, "default": anything}) | anything,
        )
        | anything,
        "required": st.lists(texts | anything, max_size=3) | anything,
    },
)
questions = anything | st.fixed_dictionaries(
    {"message": texts | anything},
    optional={
        "mode": st.sampled_from(["form", "url"]) | anything,
        "requestedSchema": forms | anything,
        "url": texts | anything,
        "elicitationId": texts | anything,
    },
)


class Session:
    """A tool box over pipes, and a loop in which its tool is called again and again."""

    def __init__(self, config: ToolsConfig) -> None:
        self._runner = asyncio.Runner()
        self._opening: AbstractAsyncContextManager[McpToolBox] = connect_tools(config)
        self._owner = self._runner.get_loop().create_task(self._own())
        self._asked: asyncio.Queue[Any] = asyncio.Queue()

    async def _own(self) -> None:
        # The connection is entered and left by one task.
        async with self._opening as box:
            while (asked := await self._asked.get()) is not None:
                (tool, arguments), told = asked
                try:
                    result = await box.call(tool, arguments)
                    told.set_result(result)
                except Exception as error:  # noqa: BLE001  for the test to judge
                    told.set_exception(error)

    def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        async def ask() -> Any:
            told = asyncio.get_running_loop().create_future()
            await self._asked.put(((tool, arguments), told))
            async with asyncio.timeout(20):
                return await told

        return self._runner.run(ask())

    def close(self) -> None:
        async def end() -> None:
            await self._asked.put(None)
            await self._owner

        self._runner.run(end())
        self._runner.close()


@pytest.fixture
def open_session(config_for: ConfigFor) -> Iterator[Open]:
    opened: list[Session] = []

    def open_() -> Session:
        server = {"command": sys.executable, "args": [str(ODD_SERVER)]}
        bounds = {"max_retries": 0, "call_timeout_seconds": 0.3, "max_call_seconds": 0.3}
        config = config_for({"odd": server}, **bounds)
        opened.append(Session(config))
        return opened[-1]

    yield open_
    for session in opened:
        session.close()


def check_line(session: Session, tool: str, arguments: dict[str, Any]) -> None:
    """Check that a call has a result, or a reason of one line."""
    try:
        said = session.call(tool, arguments).content
    except ToolError as error:
        said = str(error)
        assert "\n" not in said
    said.encode()


@pytest.mark.fuzz(60)
def test_any_answer_is_a_result_or_a_line(open_session: Open, try_cases: TryCases) -> None:
    session = open_session()
    try_cases(
        lambda result: check_line(session, "chatter", {"says": json.dumps(result)}), result=results
    )
    assert session.call("chatter", {}).content == "ok"


@pytest.mark.fuzz(20)
def test_any_question_is_answered_or_refused(open_session: Open, try_cases: TryCases) -> None:
    session = open_session()
    try_cases(
        lambda question: check_line(session, "asks", {"says": json.dumps(question)}),
        question=questions,
    )
    assert session.call("chatter", {}).content == "ok"
