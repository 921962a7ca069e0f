"""Starts one program in a root of its own: `python -I -S wall_child.py PLAN COMMAND...`.

PLAN is a JSON object, see `wall.Wall`. The program sees the paths of the plan, the system's programs,
private `/tmp`, `/run`, `/dev` and `/proc`, and its own processes. Its processes, memory and files are
bounded together. All of them end with the program, and with the process that started this one. This
module imports nothing of AgentRL, so that it starts quickly.

Root may not be confined as root: the kernel gives that id rights without any capability, as on
`/proc/sys`. The program gets an id that nobody has, and the mounts of the plan show the files of root
as those of that id.
"""

import ctypes
import errno
import json
import os
import re
import resource
import signal
import stat
import sys
import time
from contextlib import suppress
from typing import Any

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND = 0x2, 0x4, 0x8, 0x1000
_MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x4000, 0x40000, 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_IDMAP = 0x1, 0x2, 0x100000
_AT_FDCWD, _AT_RECURSIVE, _AT_EMPTY_PATH, _OPEN_TREE_CLONE = -100, 0x8000, 0x1000, 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
_SYS_CREATE_RULESET, _SYS_RESTRICT_SELF, _SCOPE_ABSTRACT_SOCKETS = 444, 446, 1
_SYS_CLONE, _SYS_PIVOT_ROOT, _SYS_KEYCTL = {"x86_64": (56, 155, 250), "aarch64": (220, 41, 219)}[
    os.uname().machine
]
_SCOPES_VERSION = 6
"""Of Landlock: Linux 6.12."""
_JOIN_SESSION_KEYRING = 1
_OUTSIDE_ID = 1 << 30
"""User and group of a program that root starts; no system assigns such ids."""
_INSIDE_ID = 1000
_MAX_PROCESSES, _MAX_FILES = 512, 500_000
_PROGRAMS = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/opt/google/chrome"),
    *(f"/etc/{name}" for name in ("alternatives", "ca-certificates", "chromium", "chromium.d")),
    *(f"/etc/{name}" for name in ("crypto-policies", "fonts", "gai.conf", "host.conf", "hosts")),
    *(f"/etc/{name}" for name in ("ld.so.cache", "localtime", "mime.types", "nsswitch.conf")),
    *(f"/etc/{name}" for name in ("npmrc", "os-release", "pip.conf", "pki", "protocols")),
    *(
        "/etc/resolv.conf",
        "/etc/services",
        "/etc/ssl",
        "/etc/timezone",
        "/etc/uv",
        "/var/cache/fontconfig",
        "/etc/X11",
        "/etc/xdg",
        "/sys/devices/system/cpu",
    ),
    *(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")),
)
"""What every program sees of the system; other files of these folders may hold secrets."""
_PRIVATE = ("/tmp", "/run", "/dev/shm", "/var/tmp")
_CANNOT_START, _KILLED = 127, 137
_SIGNALS = frozenset((signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
_MIN_TICK_SECONDS, _MAX_TICK_SECONDS, _MAX_SHARE = 0.05, 0.4, 0.05
"""Pauses between two looks at what the program uses, and the most of a core that looking takes."""

_UNSEEN = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors of looking at what has ended. Others end the program, which may limit the files of this."""
_FREE_SOCKETS, _SOCKET_BYTES = 256, 2 * 212_992
_HIDDEN = re.compile(rb" [-r][-w][-x]s .*(?:/memfd:|\(deleted\))")
_SENT = re.compile(rb"^(?:scm_fds|UserFiles):\s*[1-9]", re.MULTILINE)

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "users"))


def main(plan: dict[str, Any], command: list[str]) -> int:
    """Start the program and return its exit status; an empty command only tests the machine."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A core file would contain the memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (plan["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (plan["disk_bytes"],) * 2)
    if not plan["namespaces"]:
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        os.chdir(plan["directory"])
        return _exec(command)
    is_root = os.geteuid() == 0
    flags = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC | signal.SIGCHLD
    flags |= (0 if plan["network"] else _CLONE_NEWNET) | (0 if is_root else _CLONE_NEWUSER)
    parent_end, child_end = (os.pipe() for _ in range(2))
    ids = _shifted_ids() if is_root else None
    child = _checked("clone", _libc.syscall(_SYS_CLONE, flags, 0, 0, 0, 0))
    if child == 0:
        os._exit(_first_process(plan, command, child_end[0], parent_end[1], ids))
    os.close(parent_end[1])
    if os.read(parent_end[0], 1):
        inside = _INSIDE_ID if is_root else os.geteuid()
        _map_ids(child, inside, *((_OUTSIDE_ID,) * 2 if is_root else (os.geteuid(), os.getegid())))
        os.write(child_end[1], b"+")
    for number in _SIGNALS - {signal.SIGCHLD}:
        signal.signal(number, lambda received, _: os.kill(child, received))
    return _status(os.waitpid(child, 0)[1])


def _map_ids(pid: int, inside: int, uid: int, gid: int) -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {uid} 1"),
        ("gid_map", f"{inside} {gid} 1"),
    ):
        with open(f"/proc/{pid}/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _first_process(
    plan: dict[str, Any], command: list[str], ready: int, asking: int, ids: int | None
) -> int:
    """Start the program in namespaces whose first process is this one: its end is that of all."""
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        mask = os.umask(0)
        os.setsid()  # /dev/tty is no terminal of the user
        if ids is not None:
            os.setgroups([])
            _enter_root(plan, ids)
            _checked("unshare", _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS))
        os.write(asking, b"?")
        if not os.read(ready, 1):
            return _CANNOT_START
        if ids is not None:
            os.setresgid(*(_INSIDE_ID,) * 3)
            os.setresuid(*(_INSIDE_ID,) * 3)
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of the user resets it
        else:
            _enter_root(plan, None)
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _libc.syscall(_SYS_KEYCTL, _JOIN_SESSION_KEYRING, None)
        if _libc.syscall(_SYS_CREATE_RULESET, None, 0, 1) >= _SCOPES_VERSION:
            _leave_abstract_sockets()
        resource.setrlimit(resource.RLIMIT_NPROC, (_MAX_PROCESSES,) * 2)
        for kind in ("mnt", "ipc"):  # their files and segments would be seen by nobody
            with open(f"/proc/sys/user/max_{kind}_namespaces", "w", encoding="ascii") as file:
                file.write("0")
        if not command:
            return 0
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program gets at nothing of this process
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        program = os.fork()
        if program == 0:
            _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # its own /proc/self, after a change of user
            with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
                file.write("1000")  # short of memory, the kernel ends this rather than the run
            os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.umask(mask)
            os._exit(_exec(command))
        return _watched(program, _Bounds(plan))
    except OSError as problem:
        sys.stderr.write(f"{problem}\n")
        return _CANNOT_START


# --- the root ---------------------------------------------------------------------------------


def _enter_root(plan: dict[str, Any], ids: int | None) -> None:
    """Make the plan's root and enter it; nothing of the former root can be reached afterwards."""
    links = [
        (real, path) for real, path, _, is_own in plan["mounts"] if not is_own and real != path
    ]
    opened = [
        (os.open(source, os.O_PATH), target, writable)
        for source, target, writable, _ in plan["mounts"]
        if (source, target) not in links
    ]
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    root = "/tmp"  # exists everywhere
    size = f"mode=0755,size={plan['memory_bytes']},nr_inodes={_MAX_FILES}"
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    directory = plan["directory"]
    is_shown = any(f"{directory}/".startswith(f"{mount[1]}/") for mount in plan["mounts"])
    for path in (*_PRIVATE, *(() if is_shown else (directory,))):
        os.makedirs(root + path, exist_ok=True)
        os.chmod(root + path, 0o1777)
        _mount(root + path, root + path, None, _MS_BIND)
    for path in _PROGRAMS:
        if os.path.islink(path) and path.count("/") == 1:
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path):
            _show(os.open(path, os.O_PATH), root + path, None, writable=False)
    for source, target, writable in opened:
        _show(source, root + target, ids, writable=writable)
    for real, path in links:
        _make_folder(root + os.path.dirname(path))
        os.symlink(real, root + path)
    _write_users(root, plan["home"])
    _make_devices(root)
    os.makedirs(root + "/proc")
    _mount("proc", root + "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _set_attributes(root, _ATTR_RDONLY)
    os.chdir(root)
    _checked("pivot_root", _libc.syscall(_SYS_PIVOT_ROOT, b".", b"."))
    _checked("umount", _libc.umount2(b".", _MNT_DETACH))
    os.chdir(directory)


def _show(source: int, target: str, ids: int | None, *, writable: bool) -> None:
    """Mount an open path on a target, which is made first."""
    is_folder = stat.S_ISDIR(os.fstat(source).st_mode)
    _make_folder(target if is_folder else os.path.dirname(target))
    if not is_folder:
        with suppress(FileExistsError):
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    given = f"/proc/self/fd/{source}"
    if ids is None or not _mount_shifted(given, target, ids, must=writable):
        _mount(given, target, None, _MS_BIND | _MS_REC)
    _set_attributes(target, _ATTR_NOSUID | (0 if writable else _ATTR_RDONLY), recursive=True)
    os.close(source)


def _make_folder(path: str) -> None:
    if os.path.realpath(path) != path:
        raise OSError(errno.ELOOP, f"{path} lies behind a link")
    os.makedirs(path, exist_ok=True)


def _mount_shifted(source: str, target: str, ids: int, *, must: bool) -> bool:
    """Mount a path with the files of root as those of the program; not all file systems can."""
    tree = _libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, source.encode(), _OPEN_TREE_CLONE)
    _checked(f"open_tree {target}", tree)
    attributes = _MountAttributes(set=_ATTR_IDMAP, users=ids)
    given = (ctypes.byref(attributes), ctypes.sizeof(attributes))
    status = _libc.syscall(_SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, *given)
    if must:
        _checked(f"{target}: its file system cannot be written to by root's programs", status)
    if status == 0:
        ends = (tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
        _checked(f"move_mount {target}", _libc.syscall(_SYS_MOVE_MOUNT, *ends))
    os.close(tree)
    return bool(status == 0)


def _shifted_ids() -> int:
    """Return an open user namespace that maps root to the user of the program."""
    (asking, asked), (waiting, done) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(done)
        status = _libc.unshare(_CLONE_NEWUSER)
        os.write(asked, b"?")
        os.read(waiting, 1)
        os._exit(status)
    os.read(asking, 1)
    _map_ids(child, 0, _OUTSIDE_ID, _OUTSIDE_ID)
    users = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
    for end in (asking, asked, waiting, done):
        os.close(end)
    os.waitpid(child, 0)
    return users


def _write_users(root: str, home: str) -> None:
    number = _INSIDE_ID if os.geteuid() == 0 else os.geteuid()
    users = f"root:x:0:0:root:/:/bin/sh\nuser:x:{number}:{number}:user:{home}:/bin/sh\n"
    for name, text in (("passwd", users), ("group", f"root:x:0:\nuser:x:{number}:\n")):
        with open(f"{root}/etc/{name}", "w", encoding="utf-8") as file:
            file.write(text)


def _make_devices(root: str) -> None:
    os.makedirs(f"{root}/dev/pts")
    options = "newinstance,ptmxmode=0666,mode=0600"
    _mount("devpts", f"{root}/dev/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, options)
    os.symlink("pts/ptmx", f"{root}/dev/ptmx")
    for number, name in enumerate(("fd", "stdin", "stdout", "stderr")):
        os.symlink(
            f"/proc/self/fd/{number - 1}" if number else "/proc/self/fd", f"{root}/dev/{name}"
        )


def _leave_abstract_sockets() -> None:
    """Reach no socket of the machine whose name is no path, such as the desktop's."""
    handled = (ctypes.c_uint64 * 3)(0, 0, _SCOPE_ABSTRACT_SOCKETS)
    rules = _libc.syscall(_SYS_CREATE_RULESET, handled, ctypes.sizeof(handled), 0)
    _checked("landlock_create_ruleset", rules)
    _checked("landlock_restrict_self", _libc.syscall(_SYS_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _checked(f"mount {target}", _libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]))


def _set_attributes(path: str, attributes: int, *, recursive: bool = False) -> None:
    given = _MountAttributes(set=attributes)
    flags = _AT_RECURSIVE if recursive else 0
    arguments = (_AT_FDCWD, path.encode(), flags, ctypes.byref(given), ctypes.sizeof(given))
    _checked(f"mount_setattr {path}", _libc.syscall(_SYS_MOUNT_SETATTR, *arguments))


def _checked(operation: str, status: int) -> int:
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{operation}: {os.strerror(number)}")
    return status


# --- the program ------------------------------------------------------------------------------


def _exec(command: list[str]) -> int:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
    return _CANNOT_START


def _status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _watched(program: int, bounds: "_Bounds") -> int:
    """Return the program's exit status, or end it when its processes exceed a bound."""
    due = 0.0
    while True:
        received = signal.sigtimedwait(_SIGNALS, max(0.0, due - time.monotonic()))
        if received is not None and received.si_signo != signal.SIGCHLD:
            with suppress(ProcessLookupError):
                os.kill(program, received.si_signo)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == program:
                    return _status(ended[1])
        begun = time.monotonic()
        if begun >= due:
            if (excess := bounds.excess()) is not None:
                sys.stderr.write(f"stopped by its confinement: {excess}\n")
                return _KILLED
            ended_at = time.monotonic()
            due = ended_at + max(bounds.tick, (ended_at - begun) / _MAX_SHARE)


class _Bounds:
    """What the processes of the program may use together."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._memory_bytes, self._disk_bytes = plan["memory_bytes"], plan["disk_bytes"]
        self._spare_bytes = plan["spare_bytes"]
        self._folders = [target for _, target, _, is_own in plan["mounts"] if is_own]
        self._free: dict[str, int] = {}
        self._named = 0
        self._used = -1
        self._shared_before, _ = _machine_memory()
        self.tick = _MIN_TICK_SECONDS

    def excess(self) -> str | None:
        """Return which bound is exceeded; None if none is."""
        processes = [name for name in os.listdir("/proc") if name.isdigit()]
        in_memory, on_disk = self._nameless_files(processes)
        memory = _memory_of(processes, in_memory, precise=False)
        if memory > self._memory_bytes:
            memory = _memory_of(processes, in_memory, precise=True)
        # What cannot be measured counts where it matters: other programs share the machine's figure.
        shared, free = _machine_memory()
        grown = shared - self._shared_before
        is_short = free < self._spare_bytes
        if grown > self._memory_bytes and is_short and any(map(_holds_hidden, processes)):
            memory = grown
        if memory > self._memory_bytes:
            return f"its processes use more than {self._memory_bytes >> 20} MiB of memory"
        if on_disk + self._named_files() > self._disk_bytes:
            return f"its files take more than {self._disk_bytes >> 20} MiB"
        # What stands still is looked at less often.
        is_still = abs(memory - self._used) < self._memory_bytes >> 6
        self.tick = min(2 * self.tick, _MAX_TICK_SECONDS) if is_still else _MIN_TICK_SECONDS
        self._used = memory
        return None

    def _nameless_files(self, processes: list[str]) -> tuple[int, int]:
        """Return the bytes in memory and on disk of open files that no folder shows.

        Sockets count with the most that they hold; a usual number of them is free.
        """
        disks = {os.stat(folder).st_dev for folder in self._folders}
        found: dict[tuple[int, int], int] = {}
        sockets: set[int] = set()
        for process in processes:
            with suppress(*_UNSEEN):
                for entry in os.scandir(f"/proc/{process}/fd"):
                    with suppress(*_UNSEEN):
                        status = entry.stat()
                        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                            found[status.st_dev, status.st_ino] = status.st_blocks * 512
                        elif stat.S_ISSOCK(status.st_mode):
                            sockets.add(status.st_ino)
        on_disk = sum(size for (device, _), size in found.items() if device in disks)
        in_sockets = max(0, len(sockets) - _FREE_SOCKETS) * _SOCKET_BYTES
        return sum(found.values()) - on_disk + in_sockets, on_disk

    def _named_files(self) -> int:
        """Return the bytes of the program's own folders, read again whenever their disk fills up."""
        free = {}
        for folder in self._folders:
            found = os.statvfs(folder)
            free[folder] = found.f_bfree * found.f_frsize
        if not self._free or any(
            self._free[folder] - free[folder] > self._disk_bytes >> 4 for folder in free
        ):
            self._free, self._named = free, sum(map(_size_of, self._folders))
        return self._named


def _size_of(folder: str) -> int:
    """Return the bytes of a folder's files; too many, or too deep ones, count as too large."""
    size, number, folders = 0, 0, [folder]
    while folders:
        try:
            for entry in os.scandir(folders.pop()):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    size += status.st_blocks * 512
                    number += 1
                    if stat.S_ISDIR(status.st_mode):
                        folders.append(entry.path)
        except OSError as error:
            if not isinstance(error, _UNSEEN):
                return sys.maxsize
        if number > _MAX_FILES:
            return sys.maxsize
    return size


def _memory_of(processes: list[str], nameless: int, *, precise: bool) -> int:
    """Return the bytes of memory of processes, and of files that exist in memory alone.

    Pages that processes share are divided among them where it has to be precise, which is slow.
    Files in memory may be mapped, too: the larger of both counts.
    """
    file, anonymous, shared = ("smaps_rollup", b"Pss_Anon:", b"Pss_Shmem:")
    if not precise:
        file, anonymous, shared = ("status", b"RssAnon:", b"RssShmem:")
    own = mapped = 0
    for process in processes:
        with suppress(*_UNSEEN):
            with open(f"/proc/{process}/{file}", "rb") as opened:
                text = opened.read()
            own += _kibibytes(text, anonymous) << 10
            mapped += _kibibytes(text, shared) << 10
    found = os.statvfs("/")
    in_files = nameless + (found.f_blocks - found.f_bfree) * found.f_frsize
    with open("/proc/sysvipc/shm", encoding="ascii") as segments:
        place = segments.readline().split().index("rss")
        in_files += sum(int(line.split()[place]) for line in segments)
    return own + max(mapped, in_files)


def _machine_memory() -> tuple[int, int]:
    """Return the bytes of memory of this machine that files hold, and those that are free."""
    with open("/proc/meminfo", "rb") as file:
        text = file.read()
    return _kibibytes(text, b"Shmem:") << 10, _kibibytes(text, b"MemAvailable:") << 10


def _holds_hidden(process: str) -> bool:
    """Return whether a process may hold files in memory that cannot be measured.

    Such are mapped but not open, sent to a socket that nobody reads, or of a process that closed itself.
    """
    try:
        with open(f"/proc/{process}/maps", "rb") as file:
            if _HIDDEN.search(file.read()):
                return True
        for number in os.listdir(f"/proc/{process}/fd"):
            path = f"/proc/{process}/fdinfo/{number}"
            with suppress(FileNotFoundError), open(path, "rb") as file:
                if _SENT.search(file.read()):
                    return True
    except PermissionError:
        return process != "1"
    except _UNSEEN:
        pass
    return False


def _kibibytes(text: bytes, name: bytes) -> int:
    at = text.find(name)
    return int(text[at + len(name) :].split(None, 1)[0]) if at >= 0 else 0


if __name__ == "__main__":
    try:
        sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
    except OSError as problem:
        sys.stderr.write(f"{problem}\n")
        sys.exit(_CANNOT_START)
