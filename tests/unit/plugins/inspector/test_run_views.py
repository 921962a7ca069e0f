"""What a run's pages answer beyond its first look: curves, questions, lengths, failures, live turns."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect
from support.inspected import seed, step_figures
from unit.plugins.inspector.conftest import RUN, run_elsewhere
from unit.plugins.inspector.test_inspector_pages import findings, opened

from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

OTHER_SEED = "inspected_again"
NUM_STEPS, SPIKE = 2500, 1004


@pytest.fixture(scope="module", autouse=True)
def long_run(run_uri: str, mongod: EmbeddedMongo) -> Iterator[None]:
    """A run of many steps with a spike in one of them, and another run of the same settings."""
    other_uri = mongod.uri(OTHER_SEED)

    async def fill() -> None:
        steps = [step_figures(step) for step in range(4, NUM_STEPS + 1)]
        steps[SPIKE - 4] |= {"grad_norm": 500.0, "skipped": "the gradient is not finite"}
        evals = [{"version": 1000, "reward_mean": 0.5, "total": {"low": 0.4, "high": 0.6}}]
        async with TrajectoryStore.connect(run_uri) as store:
            await store.figures.rewind("trainer", 3, steps, evals)
        async with TrajectoryStore.connect(other_uri) as store:
            await seed(store, OTHER_SEED)
            await store.figures.rewind("trainer", 3, steps, evals)
            await store.database.runs.update_one({}, {"$set": {"config.seed": 2}})

    async def drop() -> None:
        async with TrajectoryStore.connect(other_uri) as store:
            await store.drop_database()

    run_elsewhere(fill())
    yield
    run_elsewhere(drop())


def curve_of(page: Page, name: str) -> Locator:
    return page.get_by_role("figure").filter(has_text=name)


def test_totals_cover_all_steps_and_a_spike_is_found_by_zooming_in(
    page: Page, inspector: str
) -> None:
    opened(page, inspector, f"/runs/{RUN}")
    expect(
        page.locator("section", has=page.get_by_role("heading", name="Staleness"))
    ).to_contain_text("7,500")
    curve = curve_of(page, "Gradient norm")
    expect(curve).to_contain_text("lowest to highest of 3 steps")
    expect(curve).to_contain_text("alarm")
    page.get_by_label("Steps from").fill("1000")
    page.get_by_label("to", exact=True).fill("1010")
    page.get_by_role("button", name="Zoom").click()
    expect(curve).not_to_contain_text("lowest to highest")
    plot = curve.locator(".u-over")
    box = plot.bounding_box()
    assert box is not None
    plot.hover(position={"x": box["width"] * (SPIKE - 1000) / 10, "y": 20})
    pointed = curve.locator(".pointed")
    expect(pointed).to_contain_text(f"step {SPIKE}")
    expect(pointed).to_contain_text("Gradient norm 500")
    expect(pointed).to_contain_text("steps without an update")
    opened(page, inspector, page.url.removeprefix(inspector))
    expect(page.get_by_label("Steps from")).to_have_value("1000")
    page.get_by_role("button", name="All steps").click()
    expect(curve).to_contain_text("lowest to highest of 3 steps")
    assert "from=" not in page.url


def test_curves_are_smoothed_scaled_and_zoomed_with_the_pointer(page: Page, inspector: str) -> None:
    opened(page, inspector, f"/runs/{RUN}")
    curve = curve_of(page, "Training speed")
    page.get_by_label("Smoothing").select_option("much")
    page.get_by_label("Log scale").check()
    page.wait_for_url(re.compile("smooth=0.9&log=1"))
    expect(curve).to_contain_text("smoothed")
    plot = curve.locator(".u-over")
    plot.hover()
    expect(curve.locator(".pointed")).to_have_text(re.compile(r"Training speed, smoothed [\d,]+"))
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 20, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 30, steps=4)
    page.mouse.up()
    page.wait_for_url(re.compile(r"from=\d+&to=\d+"))
    expect(page.get_by_role("heading", level=1)).to_have_text(RUN)
    assert findings(page) == []
    plot.dblclick()
    page.wait_for_url(lambda url: "from=" not in url)
    expect(page.get_by_role("heading", level=1)).to_have_text(RUN)


def test_runs_are_laid_over_one_another_and_seeds_become_a_band(page: Page, inspector: str) -> None:
    opened(page, inspector, f"/runs/{RUN}")
    page.get_by_label("Lay over").select_option(OTHER_SEED)
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare runs")
    curve = curve_of(page, "Reward, mean").first
    expect(curve).to_contain_text("lowest to highest seed")
    page.get_by_label("Runs that differ only in their seed").uncheck()
    lines = curve.get_by_role("button")
    expect(lines).to_have_text([RUN, OTHER_SEED])
    curve.locator(".u-over").hover(position={"x": 60, "y": 20})
    expect(curve.locator(".pointed")).to_contain_text(OTHER_SEED)
    lines.first.click()
    expect(lines.first).to_have_attribute("aria-pressed", "false")
    assert findings(page) == []
