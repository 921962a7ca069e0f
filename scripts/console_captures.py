"""Writes docs/console/PHASE_WIDTHxHEIGHT.txt: what a terminal shows in each phase of the demo.

    .venv/bin/python scripts/console_captures.py [80x24 120x40]

Runs the real demo in its own folder, once for each size. A terminal emulator (pyte) renders the
output; for each phase, the last of its most detailed panels is kept.
"""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pyte

from agentrl.schema import RunPhase

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs/console"
SIZES = ("80x24", "120x40")
RUN = ("--run_name", "demo", "--max_steps", "6", "--groups_per_step", "8", "--save_steps", "1")
LONGEST_SECONDS = 500.0
MORE_RUNS = 2
_WORDS = {phase: re.compile(rf"^│ {phase}\b") for phase in get_args(RunPhase)}


def screens(command: list[str], folder: Path, width: int, height: int) -> Iterator[list[str]]:
    """Run a command in a terminal of this size; yield the screen's lines after every output."""
    screen = pyte.Screen(width, height)
    stream = pyte.ByteStream(screen)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, {**os.environ, "TERM": "xterm-256color"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    deadline = time.monotonic() + LONGEST_SECONDS
    try:
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1.0)[0]:
                continue
            try:
                written = os.read(terminal, 65536)
            except OSError:  # the command has ended
                return
            stream.feed(written)
            yield [line.rstrip() for line in screen.display]
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        os.close(terminal)


def panel(lines: list[str]) -> list[str]:
    """Return the panel among the lines of a screen; nothing while it is being drawn."""
    tops = [number for number, line in enumerate(lines) if line.startswith("╭─ demo")]
    ends = [number for number, line in enumerate(lines) if line.startswith("╰")]
    whole = tops and ends and ends[-1] > tops[-1]
    return lines[tops[-1] : ends[-1] + 1] if whole else []


def capture(width: int, height: int) -> dict[str, list[str]]:
    """Run the demo and return a panel of each phase."""
    found: dict[str, list[str]] = {}
    command = [str(Path(sys.executable).with_name("agentrl")), "run", *RUN]
    with tempfile.TemporaryDirectory() as folder:
        for lines in screens(command, Path(folder), width, height):
            shown = panel(lines)
            for phase, words in _WORDS.items():
                before = found.get(phase, ["", ""])
                if words.match("".join(shown[1:2])) and _num_words(shown) >= _num_words(before):
                    found[phase] = shown
    return found


def _num_words(panel: list[str]) -> int:
    """Return the number of words in the phase's line."""
    return len(panel[1].split())


def main() -> None:
    """Capture all phases at the requested sizes."""
    TARGET.mkdir(exist_ok=True)
    for size in sys.argv[1:] or SIZES:
        width, height = map(int, size.split("x"))
        found = capture(width, height)
        for _ in range(MORE_RUNS):  # a phase may be over before it is drawn
            if found.keys() != _WORDS.keys():
                found = capture(width, height) | found
        for phase, lines in found.items():
            (TARGET / f"{phase}_{size}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{size}: {', '.join(found)}; not seen: {', '.join(_WORDS.keys() - found.keys())}")


if __name__ == "__main__":
    main()
