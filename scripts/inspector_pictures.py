"""Creates docs/images/inspector-*.png: pages of `agentrl ui --example`, light and dark.

.venv/bin/python scripts/inspector_pictures.py [--out docs/images]
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlencode

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
_LONGEST_MS = 60_000


@dataclass(frozen=True)
class Shown:
    """What a run has to show."""

    run: str
    task: str
    record: str
    unsure: int
    """The turn whose tokens were least likely in the sampler's policy."""

    def paths(self) -> dict[str, str]:
        """Return name -> path of the pages."""
        run = f"/runs/{quote(self.run)}"
        record = f"{run}/record?{urlencode({'id': self.record})}"
        return {
            "run": run,
            "groups": f"{run}/groups",
            "group": f"{run}/group?{urlencode({'task': self.task})}",
            "record": f"{record}&colour=logprob",
            "questions": f"{run}/questions",
            "distributions": f"{run}/distributions",
        }


@contextmanager
def inspector() -> Iterator[str]:
    """Serve the pages of the example; yields the address that opens them."""
    command = [sys.executable, "-m", "agentrl", "ui", "--example"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ui:
        assert ui.stdout is not None
        yield ui.stdout.readline().strip()
        ui.terminate()


def chosen(page: Page, base: str, run: str) -> Shown:
    """Choose a question whose records diverge, and one of them with several turns."""

    def ask(question: str) -> Any:
        return page.request.get(f"{base}/api/runs/{quote(run)}/{question}").json()

    groups = ask("groups?newest=1&min_spread=0.5")["groups"]
    group = max(groups, key=lambda one: sum(bool(each["ledger"]) for each in one["tries"]))
    record = max(group["tries"], key=lambda one: one["num_turns"])["record_id"]
    turns = ask(f"record?{urlencode({'id': record})}")["turns"]
    unsure = min(turns, key=lambda one: one["mean_logprob"])["index"]
    return Shown(run, group["task_id"], record, unsure)


def draw(page: Page, base: str, shown: Shown, out: Path, scheme: str) -> None:
    """Write a picture of each page in a color scheme."""
    for name, path in shown.paths().items():
        page.goto(base + path)
        page.get_by_role("heading", level=1).wait_for()
        page.wait_for_load_state("networkidle")
        page.get_by_text("Loading").first.wait_for(state="hidden")
        if name == "record":
            page.locator(".token").first.wait_for()
            unsure = f"() => document.getElementById('turn-{shown.unsure}')"
            page.evaluate(f"{unsure}.scrollIntoView({{block: 'center'}})")
            page.locator(f"#turn-{shown.unsure} .token").first.wait_for()
        page.screenshot(path=out / f"inspector-{name}-{scheme}.png")


def main() -> None:
    """Draw the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium is not None, "needs a browser (scripts/install_desktop)"
    with inspector() as address, sync_playwright() as play:
        base = re.match(r"http://[^/]+", address)
        assert base is not None, address
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
        for scheme in schemes:
            page = browser.new_page(
                viewport={"width": 1280, "height": 720},
                color_scheme=scheme,
                reduced_motion="reduce",
            )
            page.set_default_timeout(_LONGEST_MS)
            page.goto(address)
            page.get_by_role("heading", level=1).wait_for()
            draw(page, base[0], chosen(page, base[0], "example"), arguments.out, scheme)
            page.close()


if __name__ == "__main__":
    main()
