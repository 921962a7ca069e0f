"""The inspector beside a running demo: what the run does appears without a reload."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from support.demo_run import RUN_NAME, run_command

from agentrl.store.private_mongod import running_uri

STEPS = 4


def waited_for_mongod(folder: Path, run: subprocess.Popen[bytes]) -> None:
    """Return once the run's private mongod is up."""
    while running_uri(folder / "mongo") is None:
        assert run.poll() is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_page_follows_a_run_to_its_end_and_stays_readable(
    browser: Browser, tmp_path: Path
) -> None:
    ui_command = [sys.executable, "-m", "agentrl", "ui", "--run_name", RUN_NAME]
    ui_command += ["--mongo_data_dir", str(tmp_path / "mongo")]
    with (tmp_path / "run.log").open("wb") as log:
        run = subprocess.Popen(
            run_command(tmp_path, max_steps=STEPS), cwd=tmp_path, stdout=log, stderr=log
        )
    waited_for_mongod(tmp_path, run)
    environment = {name: value for name, value in os.environ.items() if name != "MONGODB_URI"}
    with subprocess.Popen(
        ui_command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as ui:
        assert ui.stdout is not None
        address = ui.stdout.readline().strip()
        page = browser.new_page()
        page.set_default_timeout(240_000)
        page.goto(address)
        expect(page.get_by_role("heading", level=1)).to_have_text(RUN_NAME, timeout=60_000)
        expect(page.get_by_text("live", exact=True)).to_be_visible(timeout=60_000)
        for step in (1, STEPS):
            link = page.get_by_role("link", name=re.compile(f"^Step {step},"))
            expect(link).to_be_visible(timeout=240_000)
        assert run.wait(120) == 0
        expect(page.get_by_text("completed", exact=True)).to_be_visible(timeout=60_000)
        # The run's mongod is gone; the inspector serves the data itself now.
        page.goto(f"{address.partition('/runs')[0]}/runs/{RUN_NAME}/groups")
        cells = page.locator(".cell")
        expect(cells.first).to_be_visible(timeout=60_000)
        cells.first.click()
        expect(page.get_by_role("region", name="Model output").first).to_be_visible(timeout=60_000)
        page.close()
        ui.terminate()
    assert ui.returncode == 0
