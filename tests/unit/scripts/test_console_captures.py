"""The panels in the documentation, and what a terminal makes of the panel."""

import io
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console
from rich.live import Live

from agentrl.launcher.console.run_panel import RunView, panel
from agentrl.schema import RunPhase

DOCS = Path(__file__).parents[3] / "docs"
SIZES = ("80x24", "120x40")


@pytest.mark.parametrize(("phase", "size"), list(product(get_args(RunPhase), SIZES)))
def test_the_page_shows_every_phase_at_every_size(phase: str, size: str) -> None:
    name = f"{phase}_{size}.txt"
    assert f'--8<-- "docs/console/{name}"' in (DOCS / "console.md").read_text()
    lines = (DOCS / "console" / name).read_text().splitlines()
    width, height = map(int, size.split("x"))
    assert {len(line) for line in lines} == {width}
    assert len(lines) < height
    assert lines[1].startswith(f"│ {phase}")


@pytest.mark.slow
def test_ctrl_c_does_not_double_the_panel() -> None:
    pyte = pytest.importorskip("pyte")
    screen = pyte.Screen(80, 24)
    terminal = pyte.Stream(screen)
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, height=24)
    with Live(console=console, auto_refresh=False) as live:
        for step in range(3):
            live.update(panel(RunView("demo", 3, seconds=step)), refresh=True)
            if step == 1:
                written.write("^C")  # what the terminal echoes where the cursor stands
    terminal.feed(written.getvalue().replace("\n", "\r\n"))
    tops = [line for line in screen.display if line.startswith("╭─ demo")]
    assert len(tops) == 1
