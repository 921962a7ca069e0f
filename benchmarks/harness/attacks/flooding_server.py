"""Tools that answer with far too much: `python flooding_server.py PORT`.

MCP over HTTP at `/many` (200,000 tools), `/described` (a description of 50 MB) and `/calls`, whose
tools are named after what they answer; an aggregator at `/mcpapi`; and a judge at `/v1`, whose
verdict is 3 MB that unpack to 3 GB.
"""

import json
import struct
import sys
import zlib
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_BLOCK_BYTES, _NUM_BLOCKS = 64 << 20, 48
_CALLS = ("blocks", "packed", "endless")


@cache
def packed() -> bytes:
    """Return 3 MB in gzip's form that unpack to 3 GB of spaces."""
    block = b" " * _BLOCK_BYTES
    packer = zlib.compressobj(wbits=-15)
    # What follows a full flush refers to nothing before it, so that it may be repeated.
    whole = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = 0
    for _ in range(_NUM_BLOCKS):
        checksum = zlib.crc32(block, checksum)
    size = (_BLOCK_BYTES * _NUM_BLOCKS) % 2**32
    head = b"\x1f\x8b\x08" + bytes(6) + b"\xff"
    return head + whole * _NUM_BLOCKS + packer.flush() + struct.pack("<II", checksum, size)


def tool(name: str, description: str = "d") -> dict[str, Any]:
    """Return a tool of a listing."""
    return {"name": name, "description": description, "inputSchema": {"type": "object"}}


@cache
def listing(path: str) -> str:
    """Return what `tools/list` answers at a path."""
    if path == "/many":
        tools = [tool(f"t{number}") for number in range(200_000)]
    elif path == "/described":
        tools = [tool("look", "d" * 50_000_000)]
    else:
        tools = [tool(name) for name in _CALLS]
    return json.dumps({"tools": tools})


@cache
def blocks() -> str:
    """Return a result of 600,000 blocks."""
    return json.dumps({"content": [{"type": "text", "text": ""}] * 600_000})


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer an aggregator's listings; there are no event streams."""
        named = {"type": "function", "function": {"name": "web.endless", "parameters": {}}}
        found = {"/mcpapi/servers": {"servers": ["web"]}, "/mcpapi/tools": {"tools": [named]}}
        if self.path in found:
            self.reply(json.dumps(found[self.path]).encode())
        else:
            self.send_response(405)
            self.send_header("content-length", "0")
            self.end_headers()

    def do_POST(self) -> None:
        """Answer a call or a message."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path.startswith("/v1"):
            self.reply(packed(), encoding="gzip")
        elif self.path.startswith("/mcpapi"):
            self.endless()
        elif "id" not in body:
            self.reply(b"", status=202)
        else:
            self.answer(body)

    def answer(self, body: dict[str, Any]) -> None:
        """Answer a request of MCP."""
        method, params = body["method"], body.get("params", {})
        if method == "tools/call" and params["name"] == "packed":
            self.reply(packed(), encoding="gzip")
            return
        if method == "tools/call" and params["name"] == "endless":
            self.endless()
            return
        if method == "initialize":
            result = json.dumps(
                {
                    "protocolVersion": params["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "flood", "version": "1"},
                }
            )
        else:
            result = listing(self.path) if method == "tools/list" else blocks()
        said = f'{{"jsonrpc": "2.0", "id": {json.dumps(body["id"])}, "result": {result}}}'
        self.reply(said.encode())

    def reply(self, body: bytes, *, status: int = 200, encoding: str | None = None) -> None:
        """Send a whole answer."""
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if encoding is not None:
            self.send_header("content-encoding", encoding)
        self.end_headers()
        self._write(body)

    def endless(self) -> None:
        """Send an answer until the client has enough."""
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.close_connection = True
        while self._write(b" " * 2**20):
            pass

    def _write(self, body: bytes) -> bool:
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True
            return False
        return True

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    """Serve until killed."""
    for path in ("/many", "/described"):
        listing(path)
    packed(), blocks()
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
