"""The desktop as an MCP server over standard input and output: `python examples/desktop/server.py`.

Its tools are those of a person: the screen, a pointer, a keyboard and an address bar. Positions are
pixels of the screenshot. A model's mistakes are errors that it can read; if the display is lost,
the server exits, so that the rollout is retried elsewhere instead of being scored.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError as Refusal
from pydantic import Field

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # wherever the command was started
from agentrl.errors import ConfigError, ToolError
from examples.desktop.display import Display
from examples.desktop.end_state import desktop_state

T = TypeVar("T")

MAX_TYPED_CHARS, MAX_KEYS, MAX_NOTCHES, MAX_CLICKS, MAX_WAIT_SECONDS = 2_000, 16, 50, 3, 10.0
_MIN_PIXELS, _MAX_PIXELS = 200, 4_096
_BUTTONS = {"left": "1", "middle": "2", "right": "3"}
_WHEEL = {"up": "4", "down": "5", "left": "6", "right": "7"}
_KEYS = re.compile(r"\w{1,32}(\+\w{1,32}){0,4}", re.ASCII)
_WEB_ADDRESS = re.compile(r"https?://[^\s/?#\x00][^\s\x00]{0,2000}", re.IGNORECASE)
_KEY_DELAY_MILLISECONDS = "4"
_DRAG_PAUSE_SECONDS = "0.1"
_SETTLE_SECONDS = 0.1
"""A window shows the effect of a key or a click after a short delay."""

Column = Annotated[int, Field(description="pixels from the left")]
Row = Annotated[int, Field(description="pixels from the top")]


class Desktop:
    """The tools of a display; each method is one, with its docstring as the description."""

    def __init__(self, display: Display) -> None:
        """Use a display that has started."""
        self._display = display

    async def screenshot(self) -> Image:
        """See the screen."""
        return Image(data=await self._checked(self._display.screenshot()), format="png")

    async def open_page(self, url: str) -> str:
        """Open a web page in the browser."""
        if not _WEB_ADDRESS.fullmatch(url):
            raise Refusal(
                "the address of a page must start with http:// or https:// and have at most 2,000 "
                "characters"
            )
        await self._checked(self._display.browse(url))
        return "opened"

    async def click(
        self,
        x: Column,
        y: Row,
        button: Literal["left", "middle", "right"] = "left",
        times: Annotated[int, Field(ge=1, le=MAX_CLICKS)] = 1,
    ) -> str:
        """Click."""
        await self._use(*self._move_to(x, y), "click", "--repeat", str(times), _BUTTONS[button])
        return "clicked"

    async def drag(self, from_x: Column, from_y: Row, to_x: Column, to_y: Row) -> str:
        """Drag with the left button."""
        # A window manager starts to move a window at the first motion, and looks when it is ready.
        pause = ("sleep", _DRAG_PAUSE_SECONDS)
        start, destination = self._move_to(from_x, from_y), self._move_to(to_x, to_y)
        middle = self._move_to((from_x + to_x) // 2, (from_y + to_y) // 2)
        held = (*pause, *middle, *pause, *destination, *pause)
        await self._use(*start, "mousedown", "1", *held, "mouseup", "1")
        return "dragged"

    async def scroll(
        self,
        x: Column,
        y: Row,
        direction: Literal["up", "down", "left", "right"],
        notches: Annotated[int, Field(ge=1, le=MAX_NOTCHES)] = 5,
    ) -> str:
        """Turn the mouse wheel."""
        await self._use(*self._move_to(x, y), "click", "--repeat", str(notches), _WHEEL[direction])
        return "scrolled"

    async def type_text(self, text: Annotated[str, Field(max_length=MAX_TYPED_CHARS)]) -> str:
        """Type; a newline presses Return."""
        # xdotool types a newline as Linefeed, which GTK's programs ignore.
        for number, line in enumerate(text.split("\n")):
            if number:
                await self._use("key", "Return")
            if line:
                await self._use(
                    "type", "--delay", _KEY_DELAY_MILLISECONDS, "--file", "-", typed=line
                )
        return "typed"

    async def press_keys(
        self,
        keys: Annotated[
            list[str], Field(description='such as "Return", "ctrl+l"', max_length=MAX_KEYS)
        ],
    ) -> str:
        """Press keys, one after another."""
        for key in keys:
            if not _KEYS.fullmatch(key):
                raise Refusal(f"{key[:40]!r} is not a key; write Return, Page_Down or ctrl+l")
        await self._use("key", *keys)
        return "pressed"

    async def wait(self, seconds: Annotated[float, Field(gt=0, le=MAX_WAIT_SECONDS)]) -> str:
        """Wait, for a page that loads."""
        await asyncio.sleep(seconds)
        return "waited"

    async def open_program(self, program: Literal["terminal", "editor"]) -> str:
        """Open a program in the home folder."""
        await self._checked(self._display.open_program(program))
        return "opened"

    async def desktop_state(self) -> str:
        """Read the windows and the files of the home folder as text."""
        return json.dumps(await desktop_state(self._display))

    def _move_to(self, x: int, y: int) -> Sequence[str]:
        width, height = self._display.width, self._display.height
        if not (0 <= x < width and 0 <= y < height):
            raise Refusal(f"({x}, {y}) is outside of the screen of {width} x {height} pixels")
        return "mousemove", str(x), str(y)

    async def _use(self, *arguments: str, typed: str = "") -> None:
        await self._checked(self._display.use(*arguments, typed=typed))
        await asyncio.sleep(_SETTLE_SECONDS)

    async def _checked(self, action: Awaitable[T]) -> T:
        try:
            return await action
        except ToolError as error:
            if await self._display.has_ended():
                await asyncio.Event().wait()  # no reply to the model: this process ends
            raise Refusal(str(error)) from error


def desktop_server(display: Display) -> MCPServer[Any]:
    """Return the server of a display."""
    server = MCPServer(
        "desktop",
        instructions=f"A screen of {display.width} x {display.height} pixels with a web browser.",
        log_level="WARNING",
    )
    desktop = Desktop(display)
    for tool in (
        *(desktop.screenshot, desktop.open_page, desktop.click, desktop.drag, desktop.scroll),
        *(desktop.type_text, desktop.press_keys, desktop.wait),
    ):
        server.add_tool(tool)
    if display.has_files:
        server.add_tool(desktop.open_program)
        server.add_tool(desktop.desktop_state)
    return server


async def serve(arguments: argparse.Namespace) -> None:
    """Serve one display until standard input closes or the display is lost.

    Raises:
        ConfigError: a program is not installed, or the password is missing.
        ToolError: the display cannot be started.
    """
    width, height = arguments.size
    # Programs that a terminal started end with the X server, and may write a last file meanwhile.
    with tempfile.TemporaryDirectory(prefix="desktop-", ignore_cleanup_errors=True) as folder:
        async with Display(
            Path(folder),
            width=width,
            height=height,
            view_host=arguments.view_host,
            view_port=arguments.view_port,
            view_password=os.environ.pop("DESKTOP_VIEW_PASSWORD", ""),
            home=arguments.home,
        ) as display:
            if display.view_address:
                _log(f"watch this display at {display.view_address}")
            serving = asyncio.ensure_future(desktop_server(display).run_stdio_async())
            exited = asyncio.ensure_future(display.gone())
            done, _ = await asyncio.wait((serving, exited), return_when=asyncio.FIRST_COMPLETED)
    if serving not in done:
        _log("the display has exited")
        os._exit(1)  # a thread still waits for standard input
    exited.cancel()
    await serving


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    size = (int(found[1]), int(found[2])) if found else (0, 0)
    if not all(_MIN_PIXELS <= pixels <= _MAX_PIXELS for pixels in size):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size from {_MIN_PIXELS}x{_MIN_PIXELS} to "
            f"{_MAX_PIXELS}x{_MAX_PIXELS}"
        )
    return size


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return Path(text).absolute()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command_line = argparse.ArgumentParser(
        prog="python examples/desktop/server.py",
        description="A desktop as an MCP server over stdio.",
    )
    command_line.add_argument("--size", type=_size, default=(1024, 768), help="pixels: 1024x768")
    command_line.add_argument(
        *("--view_port", "--view-port"),
        type=int,
        default=0,
        help="port, or the next free one, at which the screen can be watched "
        "in a browser with the password DESKTOP_VIEW_PASSWORD",
    )
    command_line.add_argument(
        *("--view_host", "--view-host"),
        default="127.0.0.1",
        help="address that the viewer listens on; 0.0.0.0 in containers",
    )
    command_line.add_argument(
        "--home",
        type=_folder,
        help="folder whose copy is the home of the programs; adds a terminal, an editor, and the "
        "desktop's state as text",
    )
    return command_line


def main() -> None:
    """Parse the command line and serve."""
    try:
        asyncio.run(serve(parser().parse_args()))
    except (ConfigError, ToolError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
