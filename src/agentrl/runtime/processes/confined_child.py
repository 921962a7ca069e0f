"""Starts one program isolated from the rest of the machine.

    python -I -S confined_child.py PLAN COMMAND...

PLAN is a JSON object, see `confinement.Confinement`. The program sees only its own processes and
scratch directory, and none of the hidden paths; it can write only to its scratch directory and the
writable paths. With `places` it sees a separate root instead: the machine's programs, and these
directories. It cannot connect to the closed ports. It ends with its parent, and all processes that it
started end with it. This module imports nothing of AgentRL, so that it starts quickly.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    *(0x00020000, 0x08000000),
    *(0x10000000, 0x20000000),
    0x40000000,
)
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    *(0x1, 0x2, 0x4),
    *(0x1000, 0x4000, 0x40000),
)
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_INNER_ID = 1000
"""Id that root is mapped to; it is not 0, so that the program starts without capabilities."""
_MAX_PROCESSES = 512
_PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_ETC_FILES = (
    *("alternatives", "group", "hosts", "ld.so.cache", "localtime", "mime.types"),
    *("nsswitch.conf", "passwd", "resolv.conf", "ssl"),
)
"""Visible files of /etc; others may hold secrets."""
_DEVICES = ("null", "zero", "full", "random", "urandom")
"""Visible devices; others may be disks."""
_CANNOT_START = 127
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_SYS_LANDLOCK_CREATE_RULESET, _SYS_LANDLOCK_ADD_RULE, _SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_RULE_NET_PORT, _LANDLOCK_ACCESS_NET_CONNECT_TCP = 2, 2
_NUM_PORTS = 1 << 16
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""Instructions of classic BPF."""
_NUMBER_OFFSET, _ARCH_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_ALLOW, _FAIL_WITH = 0x7FFF0000, 0x00050000
_MSG_FASTOPEN, _AF_SMC = 0x20000000, 43
_ARCHITECTURES = {
    "x86_64": (0xC000003E, {"socket": 41, "sendto": 44, "sendmsg": 46, "sendmmsg": 307}),
    "aarch64": (0xC00000B7, {"socket": 198, "sendto": 206, "sendmsg": 211, "sendmmsg": 269}),
}
_SYS_IO_URING_SETUP, _FIRST_X32_CALL = 425, 0x40000000
_CONNECTING = (
    *(("socket", 0, _JUMP_IF_EQUAL, _AF_SMC), ("socket", 2, _JUMP_IF_AT_LEAST, 256)),
    *(("sendto", 3, _JUMP_IF_SET, _MSG_FASTOPEN), ("sendmsg", 2, _JUMP_IF_SET, _MSG_FASTOPEN)),
    ("sendmmsg", 3, _JUMP_IF_SET, _MSG_FASTOPEN),
)
"""Calls that connect to a TCP port past the rules on ports: by multipath TCP or SMC, which fall back to
TCP, and by TCP Fast Open. Name, argument, and the condition on it."""

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    )


def main(plan: dict[str, Any], command: list[str]) -> int:
    """Start the program and return its exit status; an empty command only tests the confinement."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A core file would contain the memory. The size limits a process's own data.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if plan["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_DATA, (plan["memory_bytes"],) * 2)
    if not plan["namespaces"]:
        _give_up_rights(plan)
        return _exec(command)
    directory = os.getcwd()
    _enter_namespaces(_CLONE_NEWNET if not plan["network"] else 0)
    if plan["places"]:
        _enter_private_root(plan)
    else:
        _mount_files(plan)
        os.chdir(directory)  # the new mounts cover the former working directory
    child = os.fork()
    if child == 0:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os._exit(_first_process(plan, command))
    return _wait_for(child)


def _enter_namespaces(extra_flags: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    flags = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC | extra_flags
    _check("unshare", _libc.unshare(flags))
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid or _INNER_ID} {uid} 1")
    _write("/proc/self/gid_map", f"{gid or _INNER_ID} {gid} 1")


def _mount_files(plan: dict[str, Any]) -> None:
    scratch = plan["scratch"]
    scratch_fd = os.open(scratch, os.O_PATH)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    for path in plan["writable"]:
        if os.path.exists(path):
            _mount(path, path, None, _MS_BIND | _MS_REC)
    # Hide the scratch directories of all programs, then mount this one's again.
    _mount("tmpfs", plan["siblings"], "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755")
    os.makedirs(scratch, 0o700)
    _mount(f"/proc/self/fd/{scratch_fd}", scratch, None, _MS_BIND)
    for path in plan["hidden"]:
        if os.path.isdir(path):
            _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0000")
        elif os.path.exists(path):
            _mount("/dev/null", path, None, _MS_BIND)
    _set_attributes("/", set_=_MS_RDONLY, recursive=True)
    for path in (scratch, *filter(os.path.exists, plan["writable"])):
        _set_attributes(path, clear=_MS_RDONLY)
    _mount_shared_memory("/dev/shm", plan)


def _enter_private_root(plan: dict[str, Any]) -> None:
    root = plan["scratch"]
    sources = {name: os.open(path, os.O_PATH) for name, path in plan["places"].items()}
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755")
    etc_files = (f"/etc/{name}" for name in _ETC_FILES)
    for path in (*_PROGRAMS, *etc_files, *(f"/dev/{name}" for name in _DEVICES)):
        if os.path.islink(path) and path in _PROGRAMS:
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path):
            _bind(path, root + path, is_folder=os.path.isdir(path))
    for path in plan["programs"]:
        if not path.startswith(tuple(f"{folder}/" for folder in _PROGRAMS)):
            _bind(path, root + path, is_folder=True)
    for name, source in sources.items():
        _bind(f"/proc/self/fd/{source}", root + name, is_folder=True)
    for name in ("/proc", "/dev/shm"):
        os.makedirs(root + name, exist_ok=True)
    os.symlink("/proc/self/fd", root + "/dev/fd")
    _set_attributes(root, set_=_MS_RDONLY, recursive=True)
    for name in sources:
        _set_attributes(root + name, clear=_MS_RDONLY)
    _mount_shared_memory(root + "/dev/shm", plan)
    os.chroot(root)
    os.chdir(plan["directory"])


def _mount_shared_memory(path: str, plan: dict[str, Any]) -> None:
    size = plan["memory_bytes"] or "50%"
    _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=1777,size={size}")


def _bind(source: str, target: str, *, is_folder: bool) -> None:
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(source, target, None, _MS_BIND | _MS_REC)


def _first_process(plan: dict[str, Any], command: list[str]) -> int:
    """Start the program as a child of the namespace's first process, whose exit kills all others."""
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    resource.setrlimit(resource.RLIMIT_NPROC, (_MAX_PROCESSES,) * 2)
    _give_up_rights(plan)
    child = os.fork()
    if child == 0:
        os._exit(_exec(command))
    return _wait_for(child)


def _give_up_rights(plan: dict[str, Any]) -> None:
    """Gain no rights by any program from now on, and connect to no closed port."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if plan["closed_ports"]:
        _close_ports(frozenset(plan["closed_ports"]))
        _refuse_other_ways_to_connect()


def _close_ports(closed: frozenset[int]) -> None:
    """Allow connections to every other port: Landlock has no rule that forbids one."""
    handled = (ctypes.c_uint64 * 2)(0, _LANDLOCK_ACCESS_NET_CONNECT_TCP)
    ruleset = _libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, handled, ctypes.sizeof(handled), 0)
    _check("landlock_create_ruleset", min(ruleset, 0))
    rule = (ctypes.c_uint64 * 2)(_LANDLOCK_ACCESS_NET_CONNECT_TCP, 0)
    arguments = (ruleset, _LANDLOCK_RULE_NET_PORT, ctypes.byref(rule), 0)
    for port in range(_NUM_PORTS):
        if port not in closed:
            rule[1] = port
            status = _libc.syscall(_SYS_LANDLOCK_ADD_RULE, *arguments)
            _check("landlock_add_rule", status)
    _check("landlock_restrict_self", _libc.syscall(_SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _refuse_other_ways_to_connect() -> None:
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {machine}")
    arch, numbers = _ARCHITECTURES[machine]
    absent = _FAIL_WITH | errno.ENOSYS
    # Programs of another architecture have other numbers, and so has x32.
    code = [
        *((_LOAD, 0, 0, _ARCH_OFFSET), (_JUMP_IF_EQUAL, 1, 0, arch), (_RETURN, 0, 0, absent)),
        *((_LOAD, 0, 0, _NUMBER_OFFSET), (_JUMP_IF_AT_LEAST, 0, 1, _FIRST_X32_CALL)),
        (_RETURN, 0, 0, absent),
        # Its operations connect and send without a system call of their own.
        *((_JUMP_IF_EQUAL, 0, 1, _SYS_IO_URING_SETUP), (_RETURN, 0, 0, absent)),
    ]
    for name, argument, condition, value in _CONNECTING:
        code += [
            *((_LOAD, 0, 0, _NUMBER_OFFSET), (_JUMP_IF_EQUAL, 0, 3, numbers[name])),
            (_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * argument),
            *((condition, 0, 1, value), (_RETURN, 0, 0, _FAIL_WITH | errno.EOPNOTSUPP)),
        ]
    code.append((_RETURN, 0, 0, _ALLOW))
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(code), ctypes.addressof(instructions))
    )
    _check("seccomp", _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0))


def _exec(command: list[str]) -> int:
    if not command:
        return 0
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
    return _CANNOT_START


def _wait_for(child: int) -> int:
    """Forward signals to the child, reap orphans, and return the child's exit status."""
    for handled in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(handled, lambda received, _: os.kill(child, received))
    while True:
        reaped, status = os.wait()
        if reaped == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    arguments = [
        None if argument is None else argument.encode() for argument in (source, target, kind)
    ]
    encoded_options = None if options is None else options.encode()
    _check(f"mount {target}", _libc.mount(*arguments, ctypes.c_ulong(flags), encoded_options))


def _set_attributes(path: str, set_: int = 0, clear: int = 0, *, recursive: bool = False) -> None:
    attributes = _MountAttributes(set_, clear, 0, 0)
    status = _libc.syscall(
        _SYS_MOUNT_SETATTR,
        _AT_FDCWD,
        path.encode(),
        _AT_RECURSIVE if recursive else 0,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )
    _check(f"mount_setattr {path}", status)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _check(operation: str, status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{operation}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
    except OSError as problem:
        sys.stderr.write(f"{problem.strerror}\n")
        sys.exit(_CANNOT_START)
