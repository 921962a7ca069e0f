"""Tests third-party MCP servers and writes the results to docs/mcp-servers.md.

    .venv/bin/python scripts/mcp_servers.py              all servers, and the page
    .venv/bin/python scripts/mcp_servers.py NAME...      these servers, printed

Installs missing servers from PyPI and npm into a cache folder. Lists the tools of each server and makes one
correct and one wrong call: over stdio and, if the server supports it, over HTTP; with the protocol that the
server prefers, and with the 2025 protocols. `mcp_servers.yaml` describes the servers.
"""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import yaml
from mcp import MCPError

from agentrl.errors import AgentRLError
from agentrl.runtime.ports import free_port
from agentrl.tools import ToolsConfig, connect_tools, load_mcp_servers
from agentrl.tools.servers.connection import ServerConnection

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/mcp-servers.md"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentrl" / "mcp-servers"
INSTALL_SECONDS = 500
_START_SECONDS = 60.0
_POLL_SECONDS = 0.1
Transport = Literal["stdio", "http"]
_TRANSPORTS: tuple[Transport, ...] = ("stdio", "http")
_BEGIN, _END = "<!-- table -->", "<!-- /table -->"


@dataclass(frozen=True)
class PublicServer:
    """A server, its command, and two calls to it, as `mcp_servers.yaml` describes them."""

    name: str
    call: tuple[str, Mapping[str, Any]]
    expected: str
    wrong: tuple[str, Mapping[str, Any]]
    package: str = ""
    args: Sequence[str] | None = ()
    http_args: Sequence[str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: Sequence[str] | None = None
    first: tuple[str, Mapping[str, Any]] | None = None
    source: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def registry(self) -> str:
        """Where the package comes from."""
        return ("npm" if self.package.startswith("@") else "PyPI") if self.package else "ours"


SERVERS = [
    PublicServer(**values)
    for values in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
]


@dataclass(frozen=True)
class Tried:
    """Results of one server over one transport with one protocol generation."""

    version: str
    """Negotiated protocol version."""
    num_tools: int
    is_called: bool
    fails_well: bool
    """The invalid call returned an error that the model can read."""
    problem: str = ""
    """Why the test could not be completed."""

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        marks = f"{'called' if self.is_called else 'call failed'}, "
        marks += "error reported" if self.fails_well else "wrong call answered without an error"
        return f"{self.version}: {self.num_tools} tools, {marks}"


def install(servers: Sequence[PublicServer]) -> None:
    """Install what is missing."""
    missing = [one for one in servers if not program(one).exists()]
    for server in missing:
        if server.registry == "PyPI":
            home = program(server).parents[1]
            _run([sys.executable, "-m", "venv", str(home)])
            _run([str(home / "bin/pip"), "install", "-q", server.package, *(server.beside or ())])
    node = [one.package for one in missing if one.registry == "npm"]
    if node:
        home = CACHE / "npm"
        home.mkdir(parents=True, exist_ok=True)
        quietly = ("--silent", "--no-audit", "--no-fund")
        _run(["npm", "install", *quietly, "--prefix", str(home), *node])


def program(server: PublicServer) -> Path:
    """Return the path of an installed server's command."""
    if server.registry == "ours":
        return Path(sys.executable)
    if server.registry == "PyPI":
        plain = server.package.partition("==")[0]
        home = "pypi" if server.beside is None else f"pypi-{plain}"
        return CACHE / home / "bin" / ("python" if server.source else plain)
    folder = CACHE / "npm/node_modules/.bin"
    plain = server.package.rpartition("@")[0].rpartition("/")[2]
    app = f"mcp-{plain.removeprefix('server-')}-server"
    return next((folder / n for n in (f"mcp-{plain}", app) if (folder / n).exists()), folder / app)


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_SECONDS)


async def row_of(server: PublicServer) -> str:
    """Return a server's row of the table."""
    tried = [
        await try_server(server, transport, is_legacy=is_legacy)
        for transport in _TRANSPORTS
        for is_legacy in (False, True)
    ]
    name = server.name if " " in server.name else f"`{server.name}`"
    return f"| {' | '.join([name, server.registry, *tried])} |"


async def try_server(server: PublicServer, transport: Transport, *, is_legacy: bool) -> str:
    """List a server's tools, send a valid and an invalid call, and return the results."""
    given = server.args if transport == "stdio" else server.http_args
    if given is None:
        return "-"
    with tempfile.TemporaryDirectory() as folder:
        await asyncio.to_thread(_write_fixtures, server, folder)
        known = {"dir": folder, "cache": str(CACHE), "root": str(ROOT), "port": str(free_port())}
        words = [str(program(server)), *_filled(given, known)]
        variables = _filled(server.environment, known)
        if transport == "stdio":
            entry: dict[str, Any] = {"command": words[0], "args": words[1:], "env": variables}
            entry["writable"] = [folder]
            return str(await _try_entry(server, entry, known, is_legacy=is_legacy))
        address = f"http://127.0.0.1:{known['port']}/mcp"
        entry = {"url": address, "headers": dict(server.headers)}
        async with _listening(words, variables, int(known["port"])):
            return str(await _try_entry(server, entry, known, is_legacy=is_legacy))


def _write_fixtures(server: PublicServer, folder: str) -> None:
    """Fill a folder with what servers need: a repository, a page, and their own source."""
    _run(["git", "init", "-q", "-b", "branch", folder])
    Path(folder, "server").write_text(server.source)
    Path(folder, "page.html").write_text("<html><body><p>The lamp costs 21.</p></body></html>")


@contextmanager
def _page(folder: str) -> Iterator[str]:
    """Serve a folder on this machine; yields the address of the page in it."""
    handler = partial(_QuietHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}/page.html"
        http.shutdown()


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


async def _try_entry(
    server: PublicServer, entry: dict[str, Any], known: Mapping[str, str], *, is_legacy: bool
) -> Tried:
    servers = load_mcp_servers({"it": entry | {"per_rollout": is_legacy}})
    config = ToolsConfig(servers=servers, max_retries=0, connect_timeout_seconds=30.0)
    version, num_tools = "", 0
    try:
        async with connect_tools(config) as box, box.for_rollout() as mine:
            num_tools = len(box.specs)
            version = box.protocol_versions["it"]
            if server.first is not None:
                await mine.call(*server.first)
            with _page(known["dir"]) as page:
                name, arguments = _filled(server.call, {**known, "page": page})
                good = await mine.call(name, arguments)
        # The toolbox itself answers calls to unknown tools; here, the server must.
        fails_well = await _refuses(ServerConnection("it", servers["it"], config), *server.wrong)
    except (AgentRLError, TimeoutError) as error:
        return Tried(version, num_tools, False, False, " ".join(str(error).split())[:200])
    is_called = not good.is_error and re.search(server.expected, good.content) is not None
    return Tried(version, num_tools, is_called, fails_well)


async def _refuses(connection: ServerConnection, name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether an invalid call ends in an error that a model can read."""
    try:
        return bool((await connection.call_tool(name, arguments, repeatable=False)).is_error)
    except MCPError:
        return True
    finally:
        await connection.close()


def _filled(value: Any, known: Mapping[str, str]) -> Any:
    """Fill the `{name}` placeholders of texts."""
    if isinstance(value, str):
        return re.sub(r"\{(\w+)\}", lambda found: known.get(found[1], found[0]), value)
    if isinstance(value, Mapping):
        return {key: _filled(one, known) for key, one in value.items()}
    return [_filled(one, known) for one in value] if isinstance(value, list | tuple) else value


@asynccontextmanager
async def _listening(
    words: Sequence[str], variables: Mapping[str, str], port: int
) -> AsyncIterator[None]:
    """Run a server over HTTP until the context ends."""
    process = await asyncio.create_subprocess_exec(
        *words,
        env=os.environ | variables,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        for _ in range(int(_START_SECONDS / _POLL_SECONDS)):
            if await _listens(port):
                break
            await asyncio.sleep(_POLL_SECONDS)
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def main(names: Sequence[str]) -> None:
    """Test the servers; print, and optionally write, the table."""
    chosen = [one for one in SERVERS if not names or one.name in names]
    install(chosen)
    head = (
        "| server | from | stdio | stdio, 2025 | HTTP | HTTP, 2025 |\n|---|---|---|---|---|---|\n"
    )
    rows = []
    for server in chosen:
        rows.append(await row_of(server) + "\n")
        print(rows[-1], end="", flush=True)
    if not names:
        before, _, rest = PAGE.read_text().partition(_BEGIN)
        after = rest.partition(_END)[2]
        PAGE.write_text(f"{before}{_BEGIN}\n\n{head}{''.join(rows)}\n{_END}{after}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
