"""Sandboxes for the commands of a policy: processes with a private root, or Docker containers.

Both keep only files between commands: every command starts in the sandbox's directory. Neither has
network access unless enabled, nor any of this process's environment variables.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, Self

from agentrl.errors import AgentError, ConfigError
from agentrl.plugins.environments.harbor_format import content_hash
from agentrl.runtime.folder_snapshots import pack_folders, unpack_folders
from agentrl.runtime.processes.wall import Wall, scratch_directory, wall_gap

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/etc", "/dev", "/proc")
"""Files in which a process sees the resources of this machine."""
_MAX_OUTPUT, _CHUNK_BYTES = 1 << 20, 1 << 16
_OUTPUT_SECONDS = 2.0
_DOCKER_SECONDS = 60.0
_TIMED_OUT = 124
"""Exit status of a command that timed out, the same as that of `timeout`."""


class Sandbox(Protocol):
    """Runs commands, and keeps files between them (context manager)."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def shell(
        self, command: str, seconds: float, variables: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Run a shell command; return its exit status and output."""
        ...

    def put(self, source: Path, target: str) -> None:
        """Copy a file, or all files of a folder, to a path of the sandbox."""
        ...

    def read(self, path: str) -> str | None:
        """Return a file's text; None if it does not exist."""
        ...

    def snapshot(self) -> bytes | None:
        """Return its files; None if they cannot be copied."""
        ...

    def restore(self, state: bytes) -> None:
        """Replace its files by those of a snapshot."""
        ...


def check_processes() -> None:
    """Refuse a machine on which processes cannot be isolated."""
    gap = wall_gap()
    if gap is not None:
        raise ConfigError(
            "runtime=process: the policy's commands would have access to this whole machine "
            f"({gap})"
        )


def check_docker() -> None:
    """Refuse a machine without Docker."""
    problem = "the docker program was not found"
    if shutil.which("docker") is not None:
        status, output = _run(["docker", "version", "--format", "{{.Server.Version}}"], 10.0)
        problem = (
            "" if status == 0 else (output.strip().splitlines() or ["it does not respond"])[-1]
        )
    if problem:
        raise ConfigError(
            f"Docker is not usable ({problem}); ?runtime=process runs tasks without it"
        )


class ProcessSandbox:
    """Processes that see the machine's programs, and private directories at the paths of a container.

    Each top-level directory that files are copied to, or that commands start in, is private.
    """

    def __init__(
        self, directory: str, variables: Mapping[str, str], *, memory_mb: int, network: bool
    ) -> None:
        self._files = scratch_directory("agentrl-harbor-")
        self._root = Path(self._files.name)
        self._directory = directory
        self._variables = {"PATH": _PATH, "HOME": "/root", "TERM": "dumb", **variables}
        self._memory_bytes, self._network = memory_mb << 20, network
        for place in ("/tmp", "/root", "/logs/verifier", "/logs/agent", directory):
            self._host_path(place).mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.cleanup()

    def shell(
        self, command: str, seconds: float, variables: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Run a shell command; return its exit status and output."""
        files = self._root / "files"
        wall = Wall(
            memory_bytes=self._memory_bytes,
            # A snapshot may come from a database of somebody else, with links in place of folders.
            places={f"/{one.name}": one for one in files.iterdir() if not one.is_symlink()},
            directory=self._directory,
            network=self._network,
        )
        # `env` sets them inside the sandbox: the dynamic loader and the Python that isolate it start
        # outside, and some variables change what they do.
        given = {**self._variables, **(variables or {})}
        assignments = [f"{name}={value}" for name, value in given.items()]
        words = wall.command(["env", *assignments, "bash", "-c", command])
        return _run(words, seconds, {"PATH": _PATH})

    def put(self, source: Path, target: str) -> None:
        """Copy a file, or all files of a folder, to a path of the sandbox."""
        destination = self._host_path(target)
        if source.is_dir():
            ignored = shutil.ignore_patterns("Dockerfile") if source.name == "environment" else None
            shutil.copytree(source, destination, dirs_exist_ok=True, ignore=ignored)
        else:
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, destination)

    def read(self, path: str) -> str | None:
        """Return a file's text; None if it does not exist."""
        # Read inside: a link made by the policy may point to a file of this machine.
        status, text = self.shell(f"cat {path} 2>/dev/null", _DOCKER_SECONDS)
        return text if status == 0 else None

    def snapshot(self) -> bytes | None:
        """Return its files; None if they are too large to be copied."""
        return pack_folders(self._folders)

    def restore(self, state: bytes) -> None:
        """Replace its files by those of a snapshot."""
        unpack_folders(state, self._folders)

    @property
    def _folders(self) -> dict[str, Path]:
        return {"files": self._root / "files"}

    def _host_path(self, path: str) -> Path:
        return self._root / "files" / path.strip("/")


class DockerSandbox:
    """One container.

    Args:
        image: an image's name, or the folder that it is built from.
        directory: where commands start; the image's own by default.
        variables: further variables.
        memory_mb: memory limit.
        num_cpus: CPU limit.
        network: whether it has network access.
        build_seconds: timeout of the image build.
    """

    def __init__(
        self,
        image: str | Path,
        directory: str | None,
        variables: Mapping[str, str],
        *,
        memory_mb: int,
        num_cpus: float,
        network: bool,
        build_seconds: float,
    ) -> None:
        name = image if isinstance(image, str) else _build_image(image, build_seconds)
        words = ["docker", "run", "--detach", "--rm", "--cap-drop=ALL"]
        words += ["--cap-add=CHOWN", "--cap-add=DAC_OVERRIDE", "--cap-add=FOWNER"]
        words += [f"--memory={memory_mb}m", f"--cpus={num_cpus:g}", "--pids-limit=512"]
        words += [f"--network={'bridge' if network else 'none'}"]
        words += [f"--workdir={directory}"] if directory else []
        words += [f"--env={key}={value}" for key, value in variables.items()]
        self._id = _docker([*words, "--entrypoint=sleep", name, "infinity"], build_seconds).strip()
        self.shell("mkdir -p /logs/verifier /logs/agent", _DOCKER_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _run(["docker", "rm", "--force", self._id], _DOCKER_SECONDS)

    def shell(
        self, command: str, seconds: float, variables: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Run a shell command; return its exit status and output."""
        assignments = [f"--env={key}={value}" for key, value in (variables or {}).items()]
        limit = ["timeout", "--kill-after=2", f"{seconds:.0f}"]
        words = ["docker", "exec", *assignments, self._id, *limit, "bash", "-c", command]
        return _run(words, seconds + _DOCKER_SECONDS)

    def put(self, source: Path, target: str) -> None:
        """Copy a file, or all files of a folder, to a path of the sandbox."""
        folder = target if source.is_dir() else str(Path(target).parent)
        self.shell(f"mkdir -p {folder}", _DOCKER_SECONDS)
        given = f"{source}/." if source.is_dir() else str(source)
        _docker(["docker", "cp", given, f"{self._id}:{target}"], _DOCKER_SECONDS)

    def read(self, path: str) -> str | None:
        """Return a file's text; None if it does not exist."""
        status, text = self.shell(f"cat {path} 2>/dev/null", _DOCKER_SECONDS)
        return text if status == 0 else None

    def snapshot(self) -> bytes | None:
        """Return None: a branch runs the commands again in a container of its own."""
        return None

    def restore(self, state: bytes) -> None:
        """Refuse the snapshot of another kind of sandbox."""
        raise AgentError("a container cannot be restored from a snapshot")


def _build_image(context: Path, seconds: float) -> str:
    """Return the tag of the image of a folder, built unless one of the same content exists.

    Even if the tag of its base image has moved since: attempts at a task are comparable only in the
    same image.
    """
    try:
        tag = f"agentrl-harbor:{content_hash(context)}"
    except ConfigError as error:
        raise AgentError(f"cannot build an image: {error}") from None
    status, _ = _run(["docker", "image", "inspect", "--format={{.Id}}", tag], _DOCKER_SECONDS)
    if status != 0:
        _docker(["docker", "build", "--quiet", f"--tag={tag}", str(context)], seconds)
    return tag


def _docker(words: Sequence[str], seconds: float) -> str:
    status, output = _run(words, seconds)
    if status != 0:
        last = (output.strip().splitlines() or ["it printed nothing"])[-1]
        raise AgentError(f"`{' '.join(words[:2])}` failed: {last}")
    return output


def _run(
    words: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a program; return its exit status and the end of its output."""
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
        start_new_session=True,
    ) as process:
        end = bytearray()
        reading = threading.Thread(target=_read_end, args=(process.stdout, end), daemon=True)
        reading.start()
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = _TIMED_OUT
        reading.join(_OUTPUT_SECONDS)
        return status, bytes(end).decode(errors="replace")


def _read_end(stream: BinaryIO, end: bytearray) -> None:
    """Keep the end of a program's output, which may be of any length."""
    # `_run` closes the stream while another process still holds the pipe.
    with contextlib.suppress(ValueError, OSError):
        while chunk := stream.read1(_CHUNK_BYTES):  # type: ignore[attr-defined]
            end += chunk
            del end[:-_MAX_OUTPUT]
