"""What a run's pages answer beyond its first look: curves, questions, lengths, failures, live turns."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from support.inspected import NUM_GROUPS, seed, step_figures
from support.stored import claim, make_task, make_turn
from unit.plugins.inspector.conftest import RUN, opened_inspector, run_elsewhere
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
            await store.tasks.add([make_task(number) for number in range(NUM_GROUPS, 9)])
            lease = {"owner": "gone:1:aa", "fence": 1, "expires_at": datetime.now(UTC)}
            changes = {"config.seed": 2, "trainer_leases.trainer": lease, "policy_version": 0}
            await store.database.runs.update_one({}, {"$set": changes})

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
    expect(plot).to_be_visible()
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


def test_groups_open_on_what_was_sampled_last(page: Page, inspector: str) -> None:
    opened(page, inspector, f"/runs/{OTHER_SEED}/groups")
    rows = page.locator(".group-row")
    expect(rows).to_have_count(NUM_GROUPS)
    expect(rows.first).to_contain_text(f"item {NUM_GROUPS - 1}")
    unsampled = 9 - NUM_GROUPS
    expect(page.get_by_role("status")).to_have_text(
        f"9 groups, {unsampled} of them not sampled yet"
    )
    page.get_by_label("Order").select_option("oldest first")
    expect(rows).to_have_count(9)
    expect(page.get_by_role("status")).to_have_text("9 groups")


def test_a_trainer_that_is_gone_is_shown_as_stopped(page: Page, inspector: str) -> None:
    opened(page, inspector, f"/runs/{OTHER_SEED}")
    trainer = (
        page.get_by_role("region", name="Fleet").get_by_role("row").filter(has_text="gone:1:aa")
    )
    expect(trainer).to_contain_text("stopped")
    report = page.get_by_label("First answers")
    expect(report).to_contain_text("the first 5 answers, to 3 questions, before any training")


@pytest.fixture(scope="module")
def example(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A tab at the recorded run."""
    with opened_inspector(tmp_path_factory.mktemp("example"), "--example") as address:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(address)
        yield page
        page.close()


def follow_tab(page: Page, name: str) -> None:
    """Open a page of the run by its tab, and wait for its answer."""
    page.get_by_role("navigation", name="Pages of").get_by_role("link", name=name).click()
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.wait_for_function("() => !document.body.innerText.includes('Loading')")


def test_tabs_lead_to_what_the_run_has(example: Page) -> None:
    tabs = example.get_by_role("navigation", name="Pages of").get_by_role("link")
    pages = ["Overview", "Steps", "Groups", "Questions", "Evaluations"]
    expect(tabs).to_have_text([*pages, "Worst decisions", "Distributions", "Failures"])
    expect(example.get_by_text("imported", exact=True)).to_be_visible()
    follow_tab(example, "Worst decisions")
    expect(example.get_by_text("are chains")).to_be_visible()
    expect(example.get_by_text("--rollouts tree")).to_be_visible()
    follow_tab(example, "Overview")


def test_sizes_of_rollouts_are_shown_by_step_and_lead_to_them(example: Page) -> None:
    follow_tab(example, "Distributions")
    for name in ("Rewards", "Lengths", "Turns", "Tool calls", "Tool errors", "Outcomes"):
        expect(example.get_by_role("region", name=f"{name} by step")).to_be_visible()
    turns = example.get_by_role("region", name="Turns by step")
    turns.get_by_title(re.compile(r"^step 1, 3: \d+ of 48 rollouts")).click()
    assert findings(example) == []
    example.get_by_role("link", name="train/0/").first.click()
    expect(example.get_by_role("region", name="Turn 2")).to_be_visible()


def test_failures_have_kinds_with_an_example_each(example: Page) -> None:
    follow_tab(example, "Failures")
    kinds = example.locator("section", has_text="Rollouts that failed, by kind").get_by_role(
        "listitem"
    )
    expect(kinds).to_contain_text(["wrong answer", "turns limit", "length limit", "no answer"])
    expect(example.get_by_text("price takes exactly: item")).to_be_visible()
    assert findings(example) == []
    kinds.filter(has_text="turns limit").get_by_role("link", name="train/0/").click()
    expect(example.get_by_text("turns limit", exact=True)).to_be_visible()


def test_questions_show_what_was_learned_and_what_to_do_with_the_rest(example: Page) -> None:
    follow_tab(example, "Evaluations")
    table = example.get_by_role("region", name="Reward by question")
    example.get_by_label("Order").select_option("most learned")
    first = table.get_by_role("row").nth(1)
    expect(first).to_contain_text("+1")
    expect(first.get_by_role("link", name=re.compile("version 24: mean 1$"))).to_be_visible()
    example.locator(".filters select").first.select_option("training")
    example.get_by_label("Solved by").select_option("nobody")
    expect(example.get_by_text(re.compile("agentrl tasks add "))).to_be_visible()
    example.get_by_label("Solved by").select_option("everybody")
    expect(example.get_by_text("Add harder questions")).to_be_visible()
    expect(table.get_by_role("row")).to_have_count(22)
    assert findings(example) == []


def test_two_attempts_stand_side_by_side_from_where_they_part(example: Page) -> None:
    follow_tab(example, "Overview")
    example.get_by_role("link", name="Both attempts").click()
    expect(example.get_by_text("Turn 0 is the same in both")).to_be_visible()
    expect(
        example.locator("section", has_text="they part here").get_by_role("heading")
    ).to_have_text("Turn 1")
    left = example.get_by_role("region", name="Turn 1, first rollout")
    right = example.get_by_role("region", name="Turn 1, second rollout")
    expect(left.locator("del").first).to_have_text("add")
    expect(right.locator("ins").first).to_have_text("subtract")
    expect(right.locator("del")).to_have_count(0)
    assert findings(example) == []


def test_a_rollout_is_followed_while_its_turns_are_stored(
    page: Page, inspector: str, run_uri: str
) -> None:
    async def begin() -> str:
        async with TrajectoryStore.connect(run_uri) as store:
            await store.tasks.add([make_task(60, num_generations=1)])
            record = await claim(store)
            first = make_turn(record, 0, num_output=4, text="First I think.")
            await store.turns.append(first, record.fence)
            return record.id

    async def go_on(record_id: str) -> None:
        async with TrajectoryStore.connect(run_uri) as store:
            record = await store.records.get(record_id)
            assert record is not None
            second = make_turn(record, 1, num_output=4, text="Then I answer.")
            await store.turns.append(second, record.fence)

    record_id = run_elsewhere(begin())
    opened(page, inspector, f"/runs/{RUN}/live")
    expect(page.get_by_text("First I think.")).to_be_visible()
    page.get_by_role("link", name=record_id).click()
    assert f"id={quote(record_id, safe='')}" in page.url
    expect(page.get_by_label("Follow new turns")).to_be_checked()
    expect(page.get_by_role("region", name="Turn 0", exact=True)).to_contain_text("First I think.")
    run_elsewhere(go_on(record_id))
    expect(page.get_by_role("region", name="Turn 1", exact=True)).to_contain_text("Then I answer.")
    assert findings(page) == []
