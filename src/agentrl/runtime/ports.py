"""Free and reserved TCP ports, and who listens on one."""

import contextlib
import errno
import socket
import sys
from typing import Self

import psutil

from agentrl.addresses import family_of
from agentrl.errors import ConfigError

_NUM_CANDIDATES = 50


def free_port(host: str = "127.0.0.1", preferred: int = 0) -> int:
    """Return a free port: `preferred` or one of the next if possible, else any.

    Another process may still take it before it is used; the listener then reports the error.
    """
    for port in (*_candidates(preferred), 0):
        with contextlib.suppress(OSError), socket.socket(family_of(host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise ConfigError(f"cannot listen on {host}: it is not an address of this machine")


def listening(host: str, port: int, *, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens on an address."""
    try:
        return socket.create_server((host, port), family=family_of(host), backlog=backlog)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {_reason(error)}") from error


def listening_near(host: str, preferred: int) -> socket.socket:
    """Return a socket that listens on `preferred`, on one of the next ports, or on any."""
    for port in _candidates(preferred):
        try:
            return socket.create_server((host, port), family=family_of(host))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                break
    return listening(host, 0)


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; choose another with --port"
    # `create_server` repeats the address in parentheses.
    return (error.strerror or str(error)).partition(" (while attempting")[0]


class ReservedPort:
    """A port reserved for a child of this process (context manager).

    On Linux the port stays bound without listening: the child can listen on it, but no other
    process can reserve it. Elsewhere the reservation ends with the constructor.
    """

    def __init__(self, host: str, preferred: int = 0) -> None:
        """Reserve `preferred` or one of the next ports; any port if it is 0."""
        self._socket = _bind(host, preferred)
        self.port = int(self._socket.getsockname()[1])
        if sys.platform == "linux":
            # Set after binding: a second reservation fails, but the child's bind with this flag succeeds.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


def listens(pid: int, port: int) -> bool:
    """Return whether a process of the same user, or a descendant of it, listens on a port."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return False
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for connection in member.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
    return False


def is_taken(port: int) -> bool:
    """Return whether a process accepts connections at a port of the loopback interface."""
    with socket.socket() as client:
        client.settimeout(1.0)
        return port != 0 and client.connect_ex(("127.0.0.1", port)) == 0


def _candidates(preferred: int) -> range:
    return range(preferred, min(preferred + _NUM_CANDIDATES, 65536)) if preferred else range(0)


def _bind(host: str, preferred: int) -> socket.socket:
    for port in _candidates(preferred) or (0,):
        bound = socket.socket(family_of(host))
        try:
            bound.bind((host, port))
            return bound
        except OSError as error:
            bound.close()
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    raise ConfigError(
        f"{_NUM_CANDIDATES} ports of {host} from {preferred} are all in use; choose another range "
        "with --inference_port"
    )
