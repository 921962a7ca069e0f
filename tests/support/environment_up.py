"""`agentrl env up` in processes of its own, and clients of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

TOKEN = "a-token-of-the-tests"


@dataclass
class RunningEnvironment:
    """`agentrl env up` in a process of its own."""

    process: "subprocess.Popen[str]"
    connection: dict[str, Any]

    @property
    def url(self) -> str:
        return str(self.connection["mcpServers"]["aworld-mcp"]["url"])

    @property
    def token(self) -> str:
        header = self.connection["mcpServers"]["aworld-mcp"]["headers"]["Authorization"]
        return str(header).removeprefix("Bearer ").replace("${MCP_SERVER_TOKEN}", TOKEN)

    def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(self.url.replace("/mcp", "/health")).json()
        return answer

    @asynccontextmanager
    async def client(
        self,
        *,
        token: str | None = None,
        servers: str | None = None,
        more: dict[str, str] | None = None,
    ) -> AsyncIterator[Client]:
        """Connect as any MCP client would, with the SDK alone."""
        headers = {"Authorization": f"Bearer {token or self.token}", **(more or {})}
        if servers is not None:
            headers["MCP_SERVERS"] = servers
        async with (
            httpx2.AsyncClient(headers=headers, timeout=30) as http,
            Client(streamable_http_client(self.url, http_client=http)) as client,
        ):
            yield client


StartEnvironment = Callable[..., RunningEnvironment]


@contextmanager
def environments(folder: Path) -> Iterator[StartEnvironment]:
    """Yields what starts them in a folder; they end with the block."""
    started: list[subprocess.Popen[str]] = []

    def start(
        servers: dict[str, Any], *flags: str, environment: dict[str, str] | None = None
    ) -> RunningEnvironment:
        path = folder / "servers.json"
        path.write_text(json.dumps({"mcpServers": servers}))
        command = [sys.executable, "-m", "agentrl", "env", "up", "--mcp_servers", str(path)]
        started.append(
            subprocess.Popen(
                [*command, *flags],
                stdout=subprocess.PIPE,
                text=True,
                cwd=folder,
                env={**os.environ, **(environment or {})},
            )
        )
        output = started[-1].stdout
        assert output is not None
        text = ""
        while not text.endswith("\n}\n"):
            line = output.readline()
            assert line, f"it ended: {text}"
            text += line
        return RunningEnvironment(started[-1], json.loads(text))

    try:
        yield start
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()
