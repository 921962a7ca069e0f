"""Creates docs/images/inspector-*.png: pages of `agentrl ui` for a finished run of the demo.

    cd FOLDER && agentrl run --run_name demo --max_steps 30
    .venv/bin/python scripts/inspector_pictures.py FOLDER [--run_name demo] [--out docs/images] [--all]

`--all` draws every page, in light and dark mode, for wide screens and phones, to review changes to
the pages.
"""

import argparse
import itertools
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

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
WIDE, PHONE = (1280, 720), (390, 844)
IN_DOCS = ("run", "groups", "group", "record", "fork")
_LONGEST_MS = 60_000


@dataclass(frozen=True)
class Pages:
    """Addresses of pages of a run that have something to show."""

    base: str
    run: str
    task: str
    record: str
    turn: int
    unsure: int
    """The turn whose tokens were least likely in the sampler's policy."""
    step: int

    def paths(self) -> dict[str, str]:
        """Return name -> path."""
        run = f"/runs/{quote(self.run)}"
        record = f"{run}/record?{urlencode({'id': self.record})}"
        pair = urlencode({"a": f"{self.task}/0", "b": f"{self.task}/1"})
        return {
            "runs": "/",
            "run": run,
            "groups": f"{run}/groups",
            "group": f"{run}/group?{urlencode({'task': self.task})}",
            "record": f"{record}&colour=logprob",
            "plain": record,
            "fork": f"{record}&turn={self.turn}",
            "step": f"{run}/step/{self.step}",
            "diff": f"{run}/diff?{pair}",
            "search": f"{run}/search?q=price",
        }


@contextmanager
def inspector(folder: Path, run: str) -> Iterator[str]:
    """Serve the pages of a folder; yields the address that opens them."""
    command = [sys.executable, "-m", "agentrl", "ui", "--run_name", run, "--allow_control"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as ui:
        assert ui.stdout is not None
        yield ui.stdout.readline().strip()
        ui.terminate()


def chosen(page: Page, base: str, run: str) -> Pages:
    """Choose a question whose records diverge, and one of them with several turns."""
    asked = f"{base}/api/runs/{quote(run)}"

    def ask(question: str) -> Any:
        return page.request.get(f"{asked}/{question}").json()

    steps = ask("curves")["step"]
    groups = ask("groups?newest=1&min_spread=0.5")["groups"]
    group = max(groups, key=lambda one: sum(bool(each["ledger"]) for each in one["tries"]))
    record = max(group["tries"], key=lambda one: one["num_turns"])["record_id"]
    turns = ask(f"record?{urlencode({'id': record})}")["turns"]
    unsure = min(turns, key=lambda one: one["mean_logprob"])["index"]
    return Pages(base, run, group["task_id"], record, 1, unsure, steps[len(steps) // 2])


def draw(
    browser: Browser,
    pages: Pages,
    cookies: Any,
    names: tuple[str, ...],
    scheme: Literal["light", "dark"],
    size: tuple[int, int],
    target: Path,
    *,
    whole: bool,
) -> None:
    """Write a picture of each page."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.add_cookies(cookies)
    context.set_default_timeout(_LONGEST_MS)
    page = context.new_page()
    for name in names:
        page.goto(pages.base + pages.paths()[name])
        page.get_by_role("heading", level=1).wait_for()
        page.wait_for_load_state("networkidle")
        if name == "fork":
            turn = page.get_by_role("region", name=f"Turn {pages.turn}")
            turn.get_by_role("button", name="Fork here").click()
            turn.get_by_role("button", name="Continue from here").wait_for()
            turn.scroll_into_view_if_needed()
        if name == "record":
            page.locator(".token").first.wait_for()
            unsure = f"() => document.getElementById('turn-{pages.unsure}')"
            page.evaluate(f"{unsure}.scrollIntoView({{block: 'center'}})")
            page.locator(f"#turn-{pages.unsure} .token").first.wait_for()
        kind = "" if target == ROOT / "docs/images" else f"-{scheme}-{size[0]}"
        page.screenshot(path=target / f"inspector-{name}{kind}.png", full_page=whole)
    context.close()


def main() -> None:
    """Draw the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run_name", default="demo")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium is not None, "needs a browser (scripts/install_desktop)"
    with inspector(arguments.folder, arguments.run_name) as address, sync_playwright() as play:
        found = re.match(r"http://[^/]+", address)
        assert found is not None, address
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(_LONGEST_MS)
        page.goto(address)
        page.get_by_role("heading", level=1).wait_for()
        pages = chosen(page, found[0], arguments.run_name)
        cookies = page.context.cookies()
        if not arguments.all:
            draw(
                browser,
                pages,
                cookies,
                IN_DOCS,
                "light",
                WIDE,
                arguments.out.resolve(),
                whole=False,
            )
            return
        schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
        for scheme, size in itertools.product(schemes, (WIDE, PHONE)):
            names = tuple(pages.paths())
            draw(browser, pages, cookies, names, scheme, size, arguments.out, whole=True)


if __name__ == "__main__":
    main()
