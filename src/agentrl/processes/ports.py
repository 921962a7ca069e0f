"""Ports to listen on."""

import contextlib
import socket


def free_port(host: str = "127.0.0.1", preferred: int = 0) -> int:
    """Return a port that nobody listens on: `preferred` or one after it if possible, else any.

    Another process may still take it before it is used; whoever listens reports that itself.
    """
    candidates = range(preferred, min(preferred + 50, 65536)) if preferred else ()
    for port in (*candidates, 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise OSError(f"no free port on {host}")
