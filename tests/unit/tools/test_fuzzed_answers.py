"""Whatever a tool server answers is a result for the model, or a `ToolError` in one line."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.errors import ToolError
from agentrl.tools import ToolsConfig, connect_tools
from agentrl.tools.mcp_toolbox import McpToolBox

SERVER = str(Path(__file__).parent / "odd_server.py")
ConfigFor = Callable[..., ToolsConfig]

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
                says, told = asked
                try:
                    result = await box.call("chatter", {"says": says} if says else {})
                    told.set_result(result)
                except Exception as error:  # noqa: BLE001  for the test to judge
                    told.set_exception(error)

    def call(self, says: str) -> Any:
        async def ask() -> Any:
            told = asyncio.get_running_loop().create_future()
            await self._asked.put((says, told))
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
def session(config_for: ConfigFor) -> Iterator[Session]:
    server = {"command": sys.executable, "args": [SERVER]}
    opened = Session(config_for({"odd": server}, failures_until_down=10**6, max_retries=0))
    yield opened
    opened.close()


def answer_anything(session: Session, num_cases: int) -> None:
    @settings(
        max_examples=num_cases,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(result=results)
    def answer(result: Any) -> None:
        try:
            said = session.call(json.dumps(result)).content
        except ToolError as error:
            said = str(error)
            is_line = "\n" not in said
        else:
            is_line = True
        assert is_line, said
        said.encode()

    answer()
    assert session.call("").content == "ok"


def test_any_answer_is_a_result_or_a_line(session: Session) -> None:
    answer_anything(session, num_cases=60)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_thousands_of_answers_are_results_or_lines(session: Session) -> None:
    answer_anything(session, num_cases=5_000)
