"""Names under which processes hold leases, and whether the process of a name still runs."""

import getpass
import os
import socket
import uuid


def new_lease_owner() -> str:
    """Return a name for this process to hold leases under: `host:pid:namespace-random`.

    Containers may share a host name, and a pid means nothing outside its pid namespace, so the name
    contains that namespace. The random part distinguishes processes that had the same pid.
    """
    return f"{socket.gethostname()}:{os.getpid()}:{_pid_namespace()}-{uuid.uuid4().hex[:8]}"


def this_user() -> str:
    """Return who runs this process, and where: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def is_alive(owner: str) -> bool:
    """Return whether a lease owner is a running process that this one can see."""
    pid = _visible_pid(owner)
    return pid is not None and _exists(pid)


def is_dead(owner: str) -> bool:
    """Return whether a lease owner is a process of this host and namespace that has exited."""
    pid = _visible_pid(owner)
    return pid is not None and not _exists(pid)


def _visible_pid(owner: str) -> int | None:
    host, pid, suffix = ["", "", *owner.rsplit(":", 2)][-3:]
    namespace = _pid_namespace()
    is_local = host == socket.gethostname() and namespace and suffix.startswith(f"{namespace}-")
    return int(pid) if is_local else None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs under another user
        return True
    return True


def _pid_namespace() -> str:
    """Return the number of this process's pid namespace; "" if the system has none."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""
