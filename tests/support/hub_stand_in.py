"""A stand-in for the Hugging Face hub, which tests cannot reach: the routes that uploads use.

It follows what `huggingface_hub` sends and is no proof of what the hub itself accepts.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class HubStandIn:
    """What was uploaded.

    Attributes:
        url: its address, for HF_ENDPOINT.
        token: the one that it accepts.
        created: bodies of the requests that made repositories.
        files: path of a repository and file -> content.
    """

    url: str
    token: str
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)


class _Hub(ThreadingHTTPServer):
    """The server, and what it keeps."""

    stand_in: HubStandIn


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Stay silent."""

    def do_POST(self) -> None:
        assert isinstance(self.server, _Hub)
        hub = self.server.stand_in
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._answer(401, {"error": "Invalid credentials in Authorization header"})
        elif self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self._answer(200, {"url": f"{hub.url}/{_address(hub.created[-1])}"})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            settings = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": file["path"], **settings} for file in asked]
            self._answer(200, {"files": files})
        elif "/commit/" in self.path:
            repository = "/".join(self.path.split("/")[2:5])
            hub.files |= {f"{repository}/{name}": text for name, text in _added(body)}
            url = f"{hub.url}/{repository}/commit/{'0' * 40}"
            self._answer(200, {"commitOid": "0" * 40, "commitUrl": url, "success": True})
        else:
            self._answer(404, {"error": f"no route {self.path}"})

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _address(repository: dict[str, Any]) -> str:
    kind = "datasets/" if repository.get("type") == "dataset" else ""
    return f"{kind}{repository['organization']}/{repository['name']}"


def _added(commit: bytes) -> Iterator[tuple[str, bytes]]:
    for entry in map(json.loads, commit.splitlines()):
        if entry["key"] == "file":
            yield entry["value"]["path"], base64.b64decode(entry["value"]["content"])


@contextmanager
def hub_stand_in(token: str) -> Iterator[HubStandIn]:
    """Serve on loopback until the block ends."""
    server = _Hub(("127.0.0.1", 0), _Handler)
    server.stand_in = HubStandIn(f"http://127.0.0.1:{server.server_port}", token)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.stand_in
    finally:
        server.shutdown()
        server.server_close()
