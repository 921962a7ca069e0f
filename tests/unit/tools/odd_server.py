"""An MCP server over pipes that says what the SDK would not: `python odd_server.py`.

Each tool is named after what it answers. Over HTTP: `python odd_server.py json`, `sse`, or
`old_sse` (one stream for all answers), which prints its port; that one keeps no session.
"""

import gzip
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any

GOOD = '{"content": [{"type": "text", "text": "ok"}]}'
# Written as they go over the wire.
RESULTS = {
    "half": r'{"content": [{"type": "text", "text": "a\ud83d b \ud83d\ude00 \\ud83d"}]}',
    "first": GOOD,
    "null": "null",
    "garbage": '{"content": [{',
    "chatter": GOOD,
    "asks": GOOD,
    "grow": GOOD,
    "gzip": GOOD,
    "mixed": '{"content": [{"type": "video"}, {"type": "text", "text": "ok"}], "isError": null}',
    "bare": '{"content": null, "structuredContent": {"a": 1}}',
    "plain": '{"content": "ok"}',
    "listed": '{"content": [], "structuredContent": [1, 2]}',
    "dense": '{"content": [' + "0," * 400_000 + "0]}",
    "deep": '{"content": [], "structuredContent": {"a": ' + "[" * 900 + "]" * 900 + "}}",
    "huge": json.dumps({"content": [{"type": "text", "text": "z" * (70 << 20)}]})
    if sys.argv[1:]
    else GOOD,
}
ERRORS = {"own_closed": -32000, "own_timeout": -32001}
REQUESTS = ("sampling/createMessage", "roots/list", "elicitation/create")
tools = [*RESULTS, *ERRORS, "html"]


def answer(request: dict[str, Any]) -> str:
    """Return the response to a request, as JSON text."""
    method, params = request["method"], request.get("params", {})
    if method == "initialize":
        result = {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "odd", "version": "1"},
        }
        return wire(request, json.dumps(result))
    if method == "tools/list":
        listed: list[dict[str, Any]] = [
            {"name": name, "inputSchema": {"type": "object"}} for name in tools
        ]
        if "ODD_TOOL" in os.environ:
            listed[-1]["name"] = os.environ["ODD_TOOL"]
        listed.insert(0, {"name": "shapeless", "inputSchema": {"properties": {}}})
        if "ODD_PAGES" in os.environ:
            page = int(params.get("cursor", 0))
            listed = [{**listed[1], "name": f"t{page}_{number}"} for number in range(500)]
            return wire(request, json.dumps({"tools": listed, "nextCursor": str(page + 1)}))
        return wire(request, json.dumps({"tools": [*listed, listed[1]]}))
    if method == "tools/call" and params["name"] == "chatter" and params.get("arguments"):
        return wire(request, params["arguments"]["says"])
    if method == "tools/call" and params["name"] in RESULTS:
        return wire(request, RESULTS[params["name"]])
    code = ERRORS.get(params.get("name"), -32601)
    error = {"code": code, "message": f"no {method}: code {code}"}
    return json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error})


def wire(request: dict[str, Any], result: str) -> str:
    return f'{{"jsonrpc": "2.0", "id": {json.dumps(request["id"])}, "result": {result}}}'


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def serve_pipes() -> None:
    say("odd server, version 1")
    for line in sys.stdin:
        request = json.loads(line)
        name = request.get("params", {}).get("name")
        if request.get("method") is None or "id" not in request:
            continue
        if name == "chatter":
            say('{"level": "info", "id": 1, "message": "a log line"}')
            sys.stdout.buffer.write(b"\xff\xfe\n")
        if name == "asks":
            asked = request["params"].get("arguments") or {}
            for method in REQUESTS[-1:] if asked else REQUESTS:
                params = {"messages": [], "maxTokens": 1, "message": "?", "requestedSchema": {}}
                told = asked.get("says") or json.dumps(params)
                say(
                    f'{{"jsonrpc": "2.0", "id": "{method}", "method": "{method}", "params": {told}}}'
                )
                assert asked or "error" in json.loads(sys.stdin.readline())
        if name == "grow":
            tools.append("grown")
            tools.remove("first")
        say(answer(request))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stream: BufferedIOBase

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "id" not in request:
            return self.reply(202, "", b"")
        if request.get("params", {}).get("name") == "html":
            return self.reply(200, "text/html", b"<h1>It works!</h1>")
        text = answer(request).encode()
        if request.get("params", {}).get("name") == "gzip":
            text = gzip.compress(text)
        if sys.argv[1] == "old_sse":
            self.reply(202, "", b"")
            Handler.stream.write(b"event: message\ndata: " + text + b"\n\n")
            return Handler.stream.flush()
        if sys.argv[1] == "sse":
            return self.reply(200, "text/event-stream", b"event: message\ndata: " + text + b"\n\n")
        return self.reply(200, "application/json", text)

    def do_GET(self) -> None:
        if sys.argv[1] != "old_sse":
            self.reply(405, "", b"")
            return
        Handler.stream = self.wfile
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"event: endpoint\ndata: /mcp\n\n")
        self.connection.settimeout(None)
        self.rfile.read(1)
        self.close_connection = True

    def reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        if b"\x1f\x8b" in body[:40]:
            self.send_header("content-encoding", "gzip")
        self.end_headers()
        # In two pieces that part in the middle of what is odd about it.
        cut = body.find(rb"\ud83d b") + 3
        self.wfile.write(body[:cut])
        self.wfile.flush()
        try:
            self.wfile.write(body[cut:])
        except OSError:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    if not sys.argv[1:]:
        serve_pipes()
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    say(str(server.server_port))
    server.serve_forever()


if __name__ == "__main__":
    main()
