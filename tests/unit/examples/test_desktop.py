"""The desktop with its real programs: two clients on two displays, a rollout, and people who watch."""

import asyncio
import base64
import io
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp
import psutil
import pytest
from harness.scripted_engine import serve_script
from harness.tiny_tokenizer import write_seeing_tokenizer
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.types import ImageContent, TextContent
from PIL import Image
from playwright.async_api import async_playwright
from support.doc_blocks import DOCS
from support.environment_up import environments
from support.patience import PATIENCE
from support.play import begin_run, open_play, play, tool_call

from agentrl.config.sections import RolloutSection
from agentrl.errors import ConfigError
from agentrl.renderers.renderer import Renderer
from agentrl.runtime.ports import free_port
from agentrl.schema import MCPTask, rebuild_images
from agentrl.store import TrajectoryStore
from agentrl.tools import load_mcp_servers
from examples.desktop.display import NEEDED, NEEDED_TO_WATCH, Display
from examples.desktop.server import desktop_server, parser

pytestmark = pytest.mark.skipif(
    any(shutil.which(name) is None for name in (*NEEDED, *NEEDED_TO_WATCH)),
    reason="needs a desktop's packages: scripts/install_desktop",
)
EXAMPLE = DOCS.parent / "examples/desktop"
SIZE, CLICKED, LOOKED_AT = (400, 300), (200, 200), (300, 250)
"""The pointer covers where it clicks."""
GREEN, RED = (0, 170, 0), (204, 0, 0)
PAGE = """<body style="background: rgb(0, 170, 0)" onclick="
document.body.style.background = 'rgb(204, 0, 0)'" onkeydown="
document.body.style.background = event.key == 'F' ? 'rgb(204, 0, 0)' : ''">"""
LONG = "https://" + "a" * 200_000
PASSWORD = "seen-not-touched"
COMMAND = (str(EXAMPLE / "server.py"), "--size", "{}x{}".format(*SIZE))
PARTS = [str(EXAMPLE / f"{name}.py") for name in ("display", "end_state")]
SERVER = {"desktop": {"command": sys.executable, "args": list(COMMAND), "readable": PARTS}}


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """The address of a green page that a click turns red."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@asynccontextmanager
async def desktop(*flags: str, **variables: str) -> AsyncIterator[Client]:
    """A client of a desktop over its pipes."""
    started = StdioServerParameters(
        command=sys.executable, args=[*COMMAND, *flags], env={**os.environ, **variables}
    )
    async with Client(stdio_client(started)) as client:
        yield client


async def said(client: Client, tool: str, **arguments: Any) -> str:
    answer = await client.call_tool(tool, arguments)
    (content,) = answer.content
    assert isinstance(content, TextContent)
    return content.text


async def seen(client: Client) -> Image.Image:
    (content,) = (await client.call_tool("screenshot", {})).content
    assert isinstance(content, ImageContent)
    assert content.mime_type == "image/png"
    return Image.open(io.BytesIO(base64.b64decode(content.data))).convert("RGB")


async def until_seen(client: Client, colour: tuple[int, int, int]) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await seen(client)).getpixel(LOOKED_AT) != colour:
            await asyncio.sleep(0.1)


def displays() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it may end in this moment
            if process.name() == "Xvfb":
                found.append(process)
    return found


async def test_every_client_of_an_environment_sees_and_uses_a_display_of_its_own(
    tmp_path: Path, page: str
) -> None:
    with environments(tmp_path) as start:
        environment = start(SERVER)
        async with environment.client() as one, environment.client() as other:
            assert (await seen(one)).size == SIZE
            assert await said(one, "open_page", url=page) == "opened"
            await until_seen(one, GREEN)
            assert await said(one, "click", x=CLICKED[0], y=CLICKED[1]) == "clicked"
            await until_seen(one, RED)
            assert (await seen(other)).getpixel(LOOKED_AT) not in (RED, GREEN)
            assert len(displays()) == 2
        async with asyncio.timeout(PATIENCE):
            while displays():  # each ends with its client
                await asyncio.sleep(0.1)


async def test_a_keyboard_types_and_mistakes_are_told_to_the_model(page: str) -> None:
    async with desktop() as client:
        for url in (
            "file:///etc/passwd",
            "javascript:alert(1)",
            "--version",
            "http://",
            "http://a\0",
            LONG,
        ):
            assert "must start with http:// or https://" in await said(client, "open_page", url=url)
        await said(client, "open_page", url="http://127.0.0.1:1/")
        assert await said(client, "press_keys", keys=["ctrl+l"]) == "pressed"
        assert await said(client, "type_text", text=f"{page}\n") == "typed"
        await until_seen(client, GREEN)
        await said(client, "press_keys", keys=["shift+f"])
        await until_seen(client, RED)
        assert "is outside of the screen of 400 x 300" in await said(client, "click", x=400, y=0)
        assert "is outside" in await said(client, "drag", from_x=0, from_y=0, to_x=-1, to_y=0)
        for key in ("rm -rf", "--help", "NoSuchKey", LONG):
            assert key[:40] in await said(client, "press_keys", keys=[key])
        for tool, arguments in (
            ("type_text", {"text": "a" * 2_001}),
            ("wait", {"seconds": 1e9}),
            ("scroll", {"x": 1, "y": 1, "direction": "down", "notches": 10**6}),
            ("click", {"x": 1, "y": 1, "button": "4"}),
        ):
            assert (await client.call_tool(tool, arguments)).is_error


async def test_a_screenshot_is_an_image_of_the_record(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    seeing = Renderer.load(write_seeing_tokenizer(tmp_path))
    script = [tool_call("screenshot"), tool_call("press_keys", keys=["a"]), "<answer>7</answer>"]
    with serve_script(seeing, lambda _: script.pop(0)) as engine:
        await begin_run(store, engine, MCPTask(id="train/0/q1", query="What is there?", answer="7"))
        tools = {"mcpServers": SERVER}
        async with open_play(store, engine, tools, rollout=RolloutSection()) as context:
            result, turns = await play(store, context)
    assert result.outcome == "answered"
    (address,) = rebuild_images(turns)[1]
    (picture,) = await store.images.get([address])
    assert Image.open(io.BytesIO(picture.data)).size == SIZE
    assert [len(images) for images in rebuild_images(turns)] == [0, 1, 1]


async def test_people_watch_with_a_password_and_touch_nothing(page: str) -> None:
    chromium = shutil.which("chromium")
    port = free_port()
    address = f"http://127.0.0.1:{port}/vnc.html?autoconnect=true"
    async with (
        desktop("--view_port", str(port), DESKTOP_VIEW_PASSWORD=PASSWORD) as client,
        aiohttp.ClientSession() as visitor,
        async_playwright() as playwright,
    ):
        await said(client, "open_page", url=page)
        await until_seen(client, GREEN)
        # Whoever knows the port is asked for the password (security type 2), and for nothing less.
        async with visitor.ws_connect(f"http://127.0.0.1:{port}/websockify") as socket:
            assert (await socket.receive_bytes()).startswith(b"RFB 003.008")
            await socket.send_bytes(b"RFB 003.008\n")
            assert await socket.receive_bytes() == b"\x01\x02"
            await socket.send_bytes(b"\x02")
            await socket.receive_bytes()  # the challenge
            await socket.send_bytes(bytes(16))
            assert (await socket.receive_bytes())[:4] == b"\0\0\0\x01"
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        window = await browser.new_page()
        await window.goto(f"{address}&password={PASSWORD}")
        canvas = window.locator("#noVNC_container canvas")
        await canvas.wait_for()
        async with asyncio.timeout(PATIENCE):
            while await _colour_of(window) != list(GREEN):
                await asyncio.sleep(0.1)
        await canvas.click()
        await said(client, "wait", seconds=0.5)
        assert (await seen(client)).getpixel(LOOKED_AT) == GREEN
        await browser.close()


async def _colour_of(window: Any) -> list[int]:
    """The colour that a watching person sees there."""
    colour: list[int] = await window.evaluate(
        """([x, y]) => { const canvas = document.querySelector('#noVNC_container canvas')
        return [...canvas.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3) }""",
        list(LOOKED_AT),
    )
    return colour


@pytest.mark.parametrize("asked", [("wait", {"seconds": 9}), ("screenshot", {})])
async def test_a_display_that_is_gone_ends_the_server_and_no_model_is_told(
    asked: tuple[str, dict[str, Any]],
) -> None:
    async with desktop() as client:
        await seen(client)
        (display,) = displays()
        display.kill()
        with pytest.raises(MCPError, match="closed"):
            await asyncio.wait_for(client.call_tool(*asked), PATIENCE)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--view_port", "5901"],
            "requires a password in the environment variable DESKTOP_VIEW_PASSWORD",
        ),
        (["--size", "1x1"], "'1x1' is not a size from 200x200 to 4096x4096"),
        (["--size", "99999999999999999999x300"], "is not a size"),
    ],
)
async def test_mistakes_are_one_line(flags: list[str], message: str) -> None:
    program = await asyncio.create_subprocess_exec(
        sys.executable, *COMMAND, *flags, stderr=asyncio.subprocess.PIPE
    )
    _, complaint = await program.communicate()
    assert program.returncode
    assert message in complaint.decode().splitlines()[-1]


async def test_the_page_shows_every_tool_and_a_configuration_that_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DESKTOP_VIEW_PASSWORD", PASSWORD)
    text = (EXAMPLE / "README.md").read_text()
    block, _ = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    image = json.loads((DOCS.parent / "deploy/images/desktop.json").read_text())
    for given in (json.loads(block), image):
        (server,) = load_mcp_servers(given).values()
        assert server.args[0].endswith("examples/desktop/server.py")
        parser().parse_args(server.args[1:])
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    display = Display(tmp_path, width=400, height=300, home=tmp_path)
    tools = await desktop_server(display).list_tools()
    assert list(rows) == [tool.name for tool in tools]
    for tool in tools:
        for argument in tool.input_schema.get("properties", {}):
            assert f"`{argument}`" in rows[tool.name]


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs Xvfb, openbox, .* run scripts/install_desktop"):
        Display(tmp_path, width=400, height=300)


async def test_a_window_that_closes_during_the_search_is_searched_around(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The race cannot be had on demand: this xdotool loses it at its first search.
    real, lost = shutil.which("xdotool"), tmp_path / "lost"
    program = tmp_path / "bin/xdotool"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\n[ -e {lost} ] && exec {real} "$@"\ntouch {lost}\n'
        'echo "X Error of failed request:  BadWindow (invalid Window parameter)" >&2\nexit 1\n'
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    (tmp_path / "display").mkdir()
    async with Display(tmp_path / "display", width=400, height=300) as display:
        await display.browse(page)
    assert lost.exists()


async def test_a_display_asks_all_users_of_the_machine_for_its_secret(tmp_path: Path) -> None:
    async with Display(tmp_path, width=400, height=300):
        (manager,) = [p for p in psutil.Process().children() if p.name() == "openbox"]
        surroundings = manager.environ()
        secret = Path(surroundings["XAUTHORITY"])
        assert secret.stat().st_mode & 0o077 == 0
        for cookies, may in ((secret, True), (tmp_path / "none", False)):
            program = await asyncio.create_subprocess_exec(
                *("xdotool", "getmouselocation"), env=surroundings | {"XAUTHORITY": str(cookies)}
            )
            assert (await program.wait() == 0) == may
