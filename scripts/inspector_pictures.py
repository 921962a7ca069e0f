"""Creates docs/images/inspector-*.png: pages of `agentrl ui`, light and dark.

    .venv/bin/python scripts/inspector_pictures.py
    .venv/bin/agentrl run --rollouts tree --branch_rule entropy --max_steps 10 --eval_strategy no --run_name trees
    .venv/bin/python scripts/inspector_pictures.py --trees output/trees/config.yaml

Without `--trees`, the pages are those of the example; with it, those of a run that branches.
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
def inspector(*flags: str) -> Iterator[str]:
    """Serve the pages of a run; yields the address that opens them."""
    command = [sys.executable, "-m", "agentrl", "ui", *flags]
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


def draw_trees(page: Page, base: str, run: str, out: Path, scheme: str) -> None:
    """Write a picture of a run's worst decisions, and of the turns around the first of them."""
    page.goto(f"{base}{run}/decisions")
    first = page.get_by_role("region", name="Worst decisions").get_by_role("link").first
    first.wait_for()
    page.screenshot(path=out / f"inspector-decisions-{scheme}.png")
    first.click()
    page.locator(".turn-cell[aria-current]").wait_for()
    page.wait_for_load_state("networkidle")
    turns = page.locator("section", has=page.get_by_role("heading", name="Turns", exact=True))
    turns.screenshot(path=out / f"inspector-turns-{scheme}.png")


def main() -> None:
    """Draw the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    parser.add_argument("--trees", type=Path, metavar="CONFIG", help="a run that branches")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium is not None, "needs a browser (scripts/install_desktop)"
    trees: Path | None = arguments.trees
    flags = ("--example",) if trees is None else ("--config", str(trees))
    with inspector(*flags) as address, sync_playwright() as play:
        opened = re.match(r"(http://[^/]+)(/runs/[^?]+)?", address)
        assert opened is not None, address
        base, run = opened[1], opened[2]
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
            if trees is None:
                draw(page, base, chosen(page, base, "example"), arguments.out, scheme)
            else:
                draw_trees(page, base, run, arguments.out, scheme)
            page.close()


if __name__ == "__main__":
    main()
