"""The panels in the documentation, and what a terminal makes of the panel."""

import io
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console
from rich.live import Live

from agentrl.launcher.console.run_panel import RunView, panel
from agentrl.schema import RunPhase

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("phase", sorted({*get_args(RunPhase)} - {"interrupted"}))
def test_the_page_shows_every_phase(phase: str) -> None:
    name = f"{phase}_80x24.txt"
    assert f'--8<-- "docs/console/{name}"' in (DOCS / "monitoring.md").read_text()
    lines = (DOCS / "console" / name).read_text().splitlines()
    assert {len(line) for line in lines} == {80}
    assert len(lines) < 24
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
