"""Writes docs/console/PHASE_80x24.txt: what a terminal shows in each phase of the demo.

    .venv/bin/python scripts/console_captures.py

Runs the real demo in its own folder. A terminal emulator (pyte) renders the
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
WIDTH, HEIGHT = 80, 24
RUN = ("--run_name", "demo", "--max_steps", "6", "--groups_per_step", "8", "--save_steps", "1")
LONGEST_SECONDS = 500.0
MORE_RUNS = 2
_WORDS = {
    phase: re.compile(rf"^│ {phase}\b") for phase in get_args(RunPhase) if phase != "interrupted"
}


def screens(command: list[str], folder: Path) -> Iterator[list[str]]:
    """Run a command in a terminal; yield the screen's lines after every output."""
    screen = pyte.Screen(WIDTH, HEIGHT)
    stream = pyte.ByteStream(screen)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, {**os.environ, "TERM": "xterm-256color"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
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


def capture() -> dict[str, list[str]]:
    """Run the demo and return a panel of each phase."""
    found: dict[str, list[str]] = {}
    command = [str(Path(sys.executable).with_name("agentrl")), "run", *RUN]
    with tempfile.TemporaryDirectory() as folder:
        for lines in screens(command, Path(folder)):
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
    """Capture all phases."""
    found = capture()
    for _ in range(MORE_RUNS):  # a phase may be over before it is drawn
        if found.keys() != _WORDS.keys():
            found = capture() | found
    for phase, lines in found.items():
        name = f"{phase}_{WIDTH}x{HEIGHT}.txt"
        (TARGET / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{', '.join(found)}; not seen: {', '.join(_WORDS.keys() - found.keys())}")


if __name__ == "__main__":
    main()
