"""An MCP server whose tools look around: `python prying_server.py` over stdio, or `--port PORT`."""

import os
import signal
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("prying", log_level="CRITICAL")
held: list[bytearray] = []
files: list[int] = []
sys.stderr.write("starting up\n")


@server.tool()
def variables() -> dict[str, str]:
    return dict(os.environ)


@server.tool()
def write(path: str, text: str) -> str:
    """Write a file, below the own directory where the path is relative."""
    target = Path(path).expanduser()
    try:
        target.write_text(text)
    except OSError as error:
        return str(error)
    return str(target.absolute())


@server.tool()
def read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text()
    except OSError as error:
        return str(error)


@server.tool()
def find(folder: str, word: str) -> str:
    """Return the files below a folder that hold a word, as far as they can be read."""
    found = []
    for path in Path(folder).rglob("*"):
        try:
            if path.is_file() and path.stat().st_size < 10**6 and word in path.read_text():
                found.append(str(path))
        except (OSError, UnicodeDecodeError):
            continue
    return " ".join(found) or "nothing"


@server.tool()
def spy(word: str) -> str:
    """Return the processes whose variables, arguments or memory maps hold a word."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or process.name == str(os.getpid()):
            continue
        for part in ("environ", "cmdline"):
            try:
                if word.encode() in (process / part).read_bytes():
                    found.append(f"{process.name}/{part}")
            except OSError:
                continue
    return " ".join(found) or "nothing"


@server.tool()
def kill(pid: int) -> str:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        return str(error)
    return "killed"


@server.tool()
def take_memory(megabytes: int) -> str:
    try:
        held.append(bytearray(megabytes << 20))
    except MemoryError:
        return "no memory"
    return "taken"


@server.tool()
def take_files(megabytes: int, kind: str) -> str:
    """Fill a file that is memory and that nothing maps."""
    if kind == "memfd":
        files.append(os.memfd_create("taken"))
    else:
        files.append(os.open("/dev/shm/taken", os.O_CREAT | os.O_RDWR))
    if kind == "deleted":
        os.unlink("/dev/shm/taken")
    for _ in range(megabytes):
        os.write(files[-1], bytes(1 << 20))
    return "taken"


@server.tool()
def complain(text: str, times: int) -> str:
    sys.stderr.write(f"{text}\n" * times)
    sys.stderr.flush()
    return "said"


if __name__ == "__main__":
    if "--dies" in sys.argv:
        sys.exit("no module named \x1b[31mshop; token=planted-99")
    if "--port" in sys.argv:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[-1]))
    else:
        server.run("stdio")
