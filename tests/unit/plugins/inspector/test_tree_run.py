"""The pages of a real run whose rollouts branch."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, expect
from support.demo_run import RUN_NAME, config_path, run_command
from unit.plugins.inspector.conftest import LONGEST_MS, opened_inspector
from unit.plugins.inspector.test_inspector_pages import findings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "MONGODB_URI"}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The printed address of an inspector that serves two steps of the demo with branches."""
    folder: Path = tmp_path_factory.mktemp("trees")
    command = run_command(folder, max_steps=2, rollouts="tree", branch_rule="entropy")
    subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)
    with opened_inspector(folder, "--config", str(config_path(folder))) as printed:
        yield printed


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Browser, address: str) -> Iterator[Page]:
    """A tab in one theme that has opened the run."""
    scheme: Literal["light", "dark"] = request.param
    opened = browser.new_page(color_scheme=scheme, reduced_motion="reduce")
    opened.set_default_timeout(LONGEST_MS)
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.goto(address)
    yield opened
    opened.close()
    assert problems == []


def asked(page: Page, address: str, question: str) -> Any:
    """Return an answer of the inspector's interface."""
    base = address.partition("/runs")[0]
    return page.request.get(f"{base}/api/runs/{RUN_NAME}/{question}").json()


def varied_group(page: Page, address: str) -> dict[str, Any]:
    """Return a group with branches whose scores differ and that a step trained."""
    for group in asked(page, address, "groups?min_spread=0.5")["groups"]:
        found: dict[str, Any] = asked(
            page, address, f"group?task={quote(group['task_id'], safe='')}"
        )
        turns = [turn for row in found["turn_tree"] or [] for turn in row["turns"]]
        if any(turn["credit"] is not None for turn in turns):
            return found
    raise AssertionError("two steps trained no group with branches and different scores")


def test_the_worst_decisions_lead_to_their_turns_within_their_groups(
    page: Page, address: str
) -> None:
    page.get_by_role("link", name="Worst decisions").click()
    table = page.get_by_role("region", name="Worst decisions")
    first = asked(page, address, "decisions")["rows"][0]
    row = table.get_by_role("row").nth(1)
    expect(row).to_contain_text(first["question"])
    expect(row).to_contain_text("\u2212")
    assert findings(page) == []
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    row.get_by_role("link").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(first["task_id"])
    cell = page.locator(".turn-cell[aria-current]")
    expect(cell).to_contain_text(f"\u00d7 {first['worth']['num_leaves']}")
    expect(cell).to_be_in_viewport()


def test_the_run_shows_what_branches_saved(page: Page, address: str) -> None:
    rounds = asked(page, address, "curves")["totals"]["branched_records"]
    assert rounds["entropy"] > 0
    expect(page.get_by_text("Sampling saved by branches")).to_be_visible()
    bars = page.locator("section", has=page.get_by_role("heading", name="Rollouts of later rounds"))
    expect(bars.last).to_contain_text("entropy")
    page.get_by_role("link", name="Steps").click()
    expect(page.get_by_text("Tokens saved by shared prefixes")).to_be_visible()


def test_a_group_shows_where_records_leave_and_what_every_turn_is_worth(
    page: Page, address: str
) -> None:
    group = varied_group(page, address)
    base = address.partition("/runs")[0]
    page.goto(f"{base}/runs/{RUN_NAME}/group?task={quote(group['task_id'], safe='')}")
    turns = page.get_by_role("region", name="Turns", exact=True)
    cells = turns.locator(".turn-cell")
    rows = group["turn_tree"]
    expect(cells).to_have_count(sum(len(row["turns"]) for row in rows))
    branch = next(row for row in rows if row["parent"] is not None)
    expect(turns).to_contain_text(f"leaves {branch['parent']} before turn {branch['shared']}")
    shared = rows[0]["turns"][0]["worth"]
    expect(cells.first).to_contain_text(f"\u00d7 {shared['num_leaves']}")
    scored = [row["score"] for row in rows if row["score"] is not None]
    assert min(scored) <= shared["after"] <= max(scored)
    assert findings(page) == []

    page.get_by_label("Color turns by").select_option("credit")
    assert "colour=credit" in page.url
    trained = next(turn for turn in rows[0]["turns"] if turn["credit"] is not None)
    sign = "+" if trained["credit"] > 0 else "\u2212" if trained["credit"] < 0 else ""
    value = abs(trained["credit"])
    text = f"{value:.2f}" if value % 1 else f"{value:.0f}"
    expect(cells.nth(trained["index"]).locator("b")).to_have_text(sign + text)
    expect(page.get_by_label("Colors of credit").locator("li")).to_have_count(6)
    assert findings(page) == []
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    cells.first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(rows[0]["record_id"])
    assert "turn=0" in page.url
