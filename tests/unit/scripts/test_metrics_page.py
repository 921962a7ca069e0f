"""docs/metrics.md says what the table of figures says."""

import subprocess
import sys
from pathlib import Path

from agentrl.runtime.telemetry.figure_words import TABLES

ROOT = Path(__file__).parents[3]


def test_the_page_is_that_of_the_table() -> None:
    subprocess.run([sys.executable, ROOT / "scripts/metrics_page.py", "--check"], check=True)


def test_every_figure_has_a_row() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    for table in TABLES.values():
        for key, words in table.items():
            assert f"| {words.name} | `{key}` | {words.unit} |" in page
