"""Runs Python that a model wrote, for scorers and tools: without network, files or much memory."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from weakref import WeakKeyDictionary

from agentrl.errors import ConfigError
from agentrl.runtime.processes.confinement import Confinement, confinement_gap, scratch_directory

MAX_OUTPUT_BYTES = 64 * 1024
"""How much of its output is returned."""
MAX_FILE_BYTES = 16 << 20
"""Longest file, and output, of a program."""
_DIRECTORY = "/agentrl-code"
_CONCURRENT = max(1, (os.cpu_count() or 1) // 2)
_START = """\
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
sys.argv = ["program.py"]
sys.path.insert(0, {directory!r})
runpy.run_path({directory!r} + "/program.py", run_name="__main__")
"""
_slots = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()


@dataclass(frozen=True)
class CodeRun:
    """How a program ended."""

    status: int | None
    """Its exit status; None if it took too long."""
    output: str
    """Its standard output, up to `MAX_OUTPUT_BYTES`."""
    errors: str
    """Its standard error, likewise; or the limit of time, if that ended it."""
    seconds: float
    """How long it ran."""


async def run_python(
    program: str,
    *,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    seconds: float = 10.0,
    memory_megabytes: int = 1024,
) -> CodeRun:
    """Run a Python program in namespaces of its own, and return how it ended.

    It sees the machine's programs, this Python with its packages, and an empty working directory;
    no other file, process or network. It ends with this call, and all that it started with it. At
    most half as many programs run at a time as the machine has cores.

    Args:
        program: its source.
        stdin: its standard input.
        files: text files of its working directory, by name.
        seconds: how long it may run.
        memory_megabytes: memory of each of its processes.

    Raises:
        ConfigError: this machine has no namespaces, and the program would see the user's files.
    """
    gap = code_gap()
    if gap is not None:
        raise ConfigError(gap)
    slot = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_CONCURRENT))
    async with slot:
        # The directory may hold files that only its owner can remove: the program is gone by then.
        with scratch_directory("agentrl-code-") as root:
            work = Path(root, "work")
            _write_files(work, {**(files or {}), "program.py": program})
            return await asyncio.to_thread(_run, Path(root), work, stdin, seconds, memory_megabytes)


def code_gap() -> str | None:
    """Return why code of a model cannot run on this machine; None if it can."""
    gap = confinement_gap()
    if gap is None:
        return None
    return f"code of a model runs only in namespaces of its own, which this machine refuses ({gap})"


def _write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{name} is outside of the working directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, errors="surrogatepass")


def _run(root: Path, work: Path, stdin: str, seconds: float, memory_megabytes: int) -> CodeRun:
    (root / "root").mkdir(mode=0o755)
    (root / "stdin").write_text(stdin, errors="replace")
    confinement = Confinement(
        scratch=root / "root",
        memory_bytes=memory_megabytes << 20,
        places={_DIRECTORY: work},
        programs=tuple(dict.fromkeys(map(Path, (sys.base_prefix, sys.prefix)))),
        directory=_DIRECTORY,
        network=False,
    )
    start = _START.format(size=MAX_FILE_BYTES, directory=_DIRECTORY)
    # Files rather than pipes: the limit of their size is the kernel's, and nothing has to be read.
    with (
        (root / "stdin").open("rb") as given,
        (root / "output").open("w+b") as output,
        (root / "errors").open("w+b") as errors,
    ):
        started = time.monotonic()
        process = subprocess.Popen(
            confinement.command([sys.executable, "-I", "-B", "-c", start]),
            stdin=given,
            stdout=output,
            stderr=errors,
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": _DIRECTORY},
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        shown = _shown(errors) if status is not None else f"no end within {seconds:g} s"
        return CodeRun(status, _shown(output), shown, time.monotonic() - started)


def _shown(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES).decode(errors="replace")
