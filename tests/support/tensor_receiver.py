"""Stands in for SGLang where only handles matter: `python tensor_receiver.py` prints its URL and serves.

It reads `/update_weights_from_tensor` as SGLang 0.5.15 does: one entry for each rank, base64 of a pickle
of pairs of name and tensor, read by an unpickler that knows torch's modules only. It has no model: what
it would load, `/weights` reports by checksum.
"""

import base64
import hashlib
import io
import json
import pickle
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch

ALLOWED = ("builtins.", "collections.", "torch.", "multiprocessing.reduction.")
weights: dict[str, str] = {}
calls: list[str] = []
labels: list[str | None] = []


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not (module + ".").startswith(ALLOWED):
            raise pickle.UnpicklingError(f"blocked {module}.{name}")
        return super().find_class(module, name)


def receive(body: dict[str, Any]) -> None:
    (entry,) = body["serialized_named_tensors"]
    assert body["load_format"] is None
    for name, tensor in Unpickler(io.BytesIO(base64.b64decode(entry, validate=True))).load():
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        weights[name] = hashlib.sha256(data).hexdigest()
    labels.append(body["weight_version"])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({"weights": weights, "calls": calls, "labels": labels, "version": "0.5.20"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        calls.append(self.path)
        if self.path == "/update_weights_from_tensor":
            receive(body)
        self.answer({"success": True, "message": ""})

    def answer(self, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 0), Handler)
    sys.stdout.write(f"http://127.0.0.1:{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()
