"""What runs outside of the wall while ways to leave it are tried: `python wall_outside.py GIVEN`.

It holds GIVEN's mark wherever a process can: in its environment, memory and files, behind sockets, in
a terminal, in memory and queues of System V and POSIX, and in its keyring. It prints where, as JSON,
and goes on until its standard input ends.
"""

import ctypes
import json
import os
import pty
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_USER_KEYRING, _INVALIDATE = -4, 21
_ADD_KEY, _KEYCTL, _MQ_OPEN, _MQ_SEND = {
    "x86_64": (248, 250, 240, 242),
    "aarch64": (217, 219, 180, 182),
}[os.uname().machine]
_libc = ctypes.CDLL(None, use_errno=True)


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Start everything, and return where it is."""
    mark = os.environ["WALL_STAGE_SECRET"].encode()
    for path in (*given["sockets"].values(), "\0" + given["abstract"]):
        _answer(path, socket.SOCK_STREAM, mark)
    _answer("\0" + given["datagram"], socket.SOCK_DGRAM, mark)
    given["segment"] = _segment(mark, given["ipc_key"])
    in_memory = ctypes.create_string_buffer(mark)
    opened = tempfile.TemporaryFile()  # noqa: SIM115  it stays open
    opened.write(mark)
    opened.flush()
    kept.extend((in_memory, opened))
    return {
        "pids": [os.getpid()],
        "address": ctypes.addressof(in_memory),
        "terminal": _terminal(mark, given["terminal_log"]),
        "kernel": _kernel(mark),
        "key": _key(mark, given["queue"].encode()),
        "ipc_key": given["ipc_key"],
        "queue": _queue(mark, given["queue"]),
    }


kept: list[Any] = []


def _answer(path: str, kind: int, mark: bytes) -> None:
    server = socket.socket(socket.AF_UNIX, kind)
    server.bind(path)

    def stream() -> None:
        server.listen()
        while True:
            with suppress(OSError), server.accept()[0] as client:
                client.recv(16)
                client.sendall(mark)

    def datagrams() -> None:
        while True:
            with suppress(OSError):
                server.sendto(mark, server.recvfrom(16)[1])

    work = stream if kind == socket.SOCK_STREAM else datagrams
    threading.Thread(target=work, daemon=True).start()


def _terminal(mark: bytes, log: str) -> str:
    """Type the mark into a terminal all the time, and note what others write to it."""
    typing, shown = pty.openpty()
    os.set_blocking(typing, False)
    kept.append(shown)

    def go_on() -> None:
        while True:
            with suppress(OSError):
                os.write(typing, mark + b"\n")
            with suppress(OSError):
                if b"left by a program" in os.read(typing, 1 << 16):
                    with open(log, "w") as file:
                        file.write("written to")
            time.sleep(0.05)

    threading.Thread(target=go_on, daemon=True).start()
    return os.ttyname(shown)


def _kernel(mark: bytes) -> str:
    class Kernel(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.headers["Authorization"].encode() == mark
            self.send_response(200 if is_known else 403)
            self.end_headers()
            self.wfile.write(mark if is_known else b"no")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Kernel)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"


def _key(mark: bytes, name: bytes) -> int:
    return int(_libc.syscall(_ADD_KEY, b"user", name, mark, len(mark), _USER_KEYRING))


def _segment(mark: bytes, key: int) -> int:
    _libc.shmat.restype = ctypes.c_void_p
    segment = _libc.shmget(key, 4096, 0o1666)
    at = _libc.shmat(segment, None, 0)
    ctypes.memmove(at, mark, len(mark))
    return int(segment)


def _queue(mark: bytes, name: str) -> str:
    opened = _libc.syscall(_MQ_OPEN, name.encode(), os.O_RDWR | os.O_CREAT, 0o666, None)
    for _ in range(5):
        _libc.syscall(_MQ_SEND, opened, mark, len(mark), 0, None)
    return name


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    told = main(given)
    print(json.dumps(told), flush=True)
    sys.stdin.read()
    for path in given["sockets"].values():
        os.unlink(path)
    _libc.shmctl(given["segment"], 0, None)
    _libc.syscall(_KEYCTL, _INVALIDATE, told["key"])
    _libc.mq_unlink(given["queue"].encode())
