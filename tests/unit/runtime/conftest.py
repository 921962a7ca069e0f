"""A web server of somebody else."""

import threading
from collections.abc import Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler

import pytest


@pytest.fixture
def web_server() -> Iterator[str]:
    """The address of one that has pages, but nothing that AgentRL asks for."""
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()
