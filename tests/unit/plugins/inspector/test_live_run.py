"""The inspector beside a running demo: what the run does appears without a reload."""

import re
from pathlib import Path

import pytest
from harness.started import started
from playwright.sync_api import Browser, expect
from support.demo_run import RUN_NAME, run_command
from unit.plugins.inspector.conftest import opened_inspector

from agentrl.store.private_mongod import running_uri

STEPS = 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_page_follows_a_run_to_its_end_and_stays_readable(
    browser: Browser, tmp_path: Path
) -> None:
    flags = ("--run_name", RUN_NAME, "--mongo_data_dir", str(tmp_path / "mongo"))
    with started(run_command(tmp_path, max_steps=STEPS), tmp_path) as run:
        run.until(lambda: running_uri(tmp_path / "mongo"))
        with opened_inspector(tmp_path, *flags) as address:
            page = browser.new_page()
            page.set_default_timeout(240_000)
            page.goto(address)
            expect(page.get_by_role("heading", level=1)).to_have_text(RUN_NAME, timeout=60_000)
            expect(page.get_by_text("live", exact=True)).to_be_visible(timeout=60_000)
            for step in (1, STEPS):
                link = page.get_by_role("link", name=re.compile(f"^Step {step},"))
                expect(link).to_be_visible(timeout=240_000)
            assert run.process.wait(120) == 0
            expect(page.get_by_text("completed", exact=True)).to_be_visible(timeout=60_000)
            # The run's mongod is gone; the inspector serves the data itself now.
            page.goto(f"{address.partition('/runs')[0]}/runs/{RUN_NAME}/groups")
            cells = page.locator(".cell")
            expect(cells.first).to_be_visible(timeout=60_000)
            cells.first.click()
            expect(page.get_by_role("region", name="Model output").first).to_be_visible(
                timeout=60_000
            )
            page.close()
