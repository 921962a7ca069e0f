"""The pages in a real browser: what a person sees, clicks and types."""

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

import axe_playwright_python
import pytest
from playwright.sync_api import Browser, Page, expect
from support.inspected import FORKED_RECORD, HOSTILE_RECORD, HUGE, step_figures
from unit.plugins.inspector.conftest import RUN, TOKEN, run_elsewhere

from agentrl.store import TrajectoryStore

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
SERIOUS = {"serious", "critical"}
RECORD = f"/runs/{RUN}/record?id={quote(HOSTILE_RECORD, safe='')}"
GROUP = f"/runs/{RUN}/group?task={quote('train/0/q1', safe='')}"
PAGES: dict[str, str] = {
    "/": "Runs",
    f"/runs/{RUN}": RUN,
    f"/runs/{RUN}/groups": "Groups",
    GROUP: "train/0/q1",
    RECORD: HOSTILE_RECORD,
    f"{RECORD}&colour=logprob": HOSTILE_RECORD,
    f"/runs/{RUN}/step/1": "Step 1",
    f"/runs/{RUN}/search?q=marvellous": "Search: marvellous",
    f"/runs/{RUN}/diff?a=train%2F0%2Fq0%2F0&b=train%2F0%2Fq0%2F1": "Two rollouts",
    f"/runs/{RUN}/distributions": "Distributions",
    f"/runs/{RUN}/failures": "Failures",
    f"/runs/{RUN}/questions": "Questions",
    f"/runs/{RUN}/decisions": "Worst decisions",
    f"/runs/{RUN}/forks": "Forks",
    f"/runs/{RUN}/diffs": "Policy diffs",
    f"/runs/{RUN}/live": "Rollouts in progress",
    f"/compare?runs={RUN},{RUN}": "Compare runs",
}


def opened(page: Page, address: str, path: str) -> None:
    """Open a page and wait until its answers are there."""
    page.goto(address + path)
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.wait_for_function("() => !document.body.innerText.includes('Loading')")


def findings(page: Page) -> list[str]:
    """Return what axe-core finds serious in a page."""
    page.evaluate(AXE)
    found: Any = page.evaluate("() => axe.run({resultTypes: ['violations']})")
    return [
        f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:160]}"
        for one in found["violations"]
        if one["impact"] in SERIOUS
    ]


IN_SHORT = {f"/runs/{RUN}", f"{RECORD}&colour=logprob"}
"""Pages with nearly every part that the others are made of."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path in IN_SHORT else pytest.mark.slow) for path in PAGES],
)
def test_every_page_is_permanent_and_fit_for_all_readers(
    page: Page, inspector: str, path: str
) -> None:
    opened(page, inspector, path)
    expect(page.get_by_role("heading", level=1)).to_have_text(PAGES[path])
    assert findings(page) == []
    page.set_viewport_size({"width": 390, "height": 844})
    wide = page.evaluate("() => document.documentElement.scrollWidth")
    assert wide <= 390


def test_the_way_leads_from_a_run_to_a_token_and_back(page: Page, inspector: str) -> None:
    opened(page, inspector, "/")
    page.get_by_role("link", name=RUN).click()
    expect(page.get_by_text("the run is interrupted")).to_be_visible()
    page.get_by_role("link", name="Step 1,").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Step 1")
    page.get_by_role("link", name="train/0/q0/0").click()
    expect(page.get_by_role("link", name="trained at step 1")).to_be_visible()
    figures = page.get_by_label("Reported by the agent")
    expect(figures).to_contain_text("moves")
    expect(figures.locator("b")).to_have_count(0)
    expect(page.get_by_label("Columns of the question")).to_have_text('{\n  "shelf": 0\n}')
    turn = page.get_by_role("region", name="Turn 1")
    expect(turn).to_contain_text("reward 0.250")
    expect(turn).to_contain_text("seat <b>ESCleft</b>, stint 1, earned 0.750")
    page.get_by_label("Color tokens by").select_option("logprob")
    token = page.locator(".token").first
    seen = "logprob -0.* version 0; advantage 0.700, ratio 0.500, entropy 0, ratio out of range"
    expect(token).to_have_attribute("title", re.compile(seen))
    for colouring, marked in (
        ("ratio", ".worse-6"),
        ("entropy", ".unlikely-6"),
        ("masked", ".better-6"),
    ):
        page.get_by_label("Color tokens by").select_option(colouring)
        expect(page.locator(marked).first).to_be_visible()
    page.get_by_label("Color tokens by").select_option("logprob")
    assert "colour=logprob" in page.url
    page.get_by_role("link", name="trained at step 1").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Step 1")


def test_groups_are_filtered_and_the_filter_is_in_the_address(page: Page, inspector: str) -> None:
    opened(page, inspector, f"/runs/{RUN}/groups")
    rows = page.locator(".group-row")
    expect(rows).to_have_count(3)
    expect(page.get_by_role("status")).to_have_text("3 groups")
    expect(page.get_by_label("Cells")).to_contain_text("left out of training")
    expect(rows.last).to_contain_text("mean 0.50 · 2 turns · ")
    page.get_by_label("Tag").fill("counting")
    expect(rows).to_have_count(1)
    expect(page.get_by_role("status")).to_have_text("1 group")
    assert "tag=counting" in page.url
    page.get_by_role("button", name="Clear").click()
    expect(rows).to_have_count(3)
    page.get_by_label("Column").fill("shelf=2")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("item 2")
    page.get_by_label("Column").fill("shelf")
    expect(page.get_by_role("alert")).to_contain_text("give NAME=VALUE")
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Score from").fill("0.5")
    expect(rows).to_have_count(2)
    page.get_by_label("Score from").fill("much")
    expect(page.get_by_role("alert")).to_contain_text("min_score")
    page.reload()
    expect(page.get_by_label("Score from")).to_have_value("much")


def test_a_search_says_how_much_it_found_and_scores_it(page: Page, inspector: str) -> None:
    opened(page, inspector, f"/runs/{RUN}/search?q=nowhere-to-be-found")
    expect(page.get_by_role("status")).to_contain_text("No text contains all of these words")
    opened(page, inspector, f"/runs/{RUN}/search?q=marvellous")
    hits = page.locator(".passages li")
    expect(hits).not_to_have_count(0)
    expect(page.get_by_role("status")).to_contain_text(f"{hits.count()} texts contain")
    hit = hits.filter(has=page.get_by_role("link", name="train/0/q0/1"))
    expect(hit.locator(".chip")).to_have_text("1")


def test_hostile_texts_stay_texts(page: Page, inspector: str) -> None:
    opened(page, inspector, RECORD)
    expect(page).to_have_title(re.compile("^train"))
    user = page.get_by_role("region", name="Message of user").first
    expect(user).to_contain_text("<script>document.title='owned'</script><img src=x onerror=")
    for name in ("ESC", "U+202E", "U+200B"):
        expect(user.locator(".control", has_text=name).first).to_be_visible()
    expect(user).to_contain_text("\\ud800")
    assert page.evaluate("() => document.querySelectorAll('img[src=x], main script').length") == 0
    result = page.get_by_role("region", name="Result of lookup")
    before = len(result.inner_text())
    page.get_by_role("button", name="Show more").first.click()
    page.wait_for_function(
        "(least) => document.querySelector('[aria-label=\"Result of lookup\"]').innerText.length > least",
        arg=before + 100_000,
    )
    assert HUGE[:1000] in result.inner_text()
    image = page.get_by_role("img", name="Image 1 of the message").first
    image.scroll_into_view_if_needed()
    page.wait_for_function("() => document.querySelector('.images img').naturalWidth === 1")
    for path in (GROUP, f"/runs/{RUN}/groups", f"/runs/{RUN}/search?q=owned"):
        opened(page, inspector, path)
        expect(page.get_by_text("<script>").first).to_be_attached()
        assert "owned" not in page.title() or "search" in path


def test_keys_walk_and_search(page: Page, inspector: str) -> None:
    opened(page, inspector, RECORD)
    page.keyboard.press("]")
    expect(page.get_by_role("heading", level=1)).to_have_text("train/0/q1/1")
    page.keyboard.press("c")
    expect(page.get_by_label("Color tokens by")).to_have_value("logprob")
    page.keyboard.press("u")
    expect(page.get_by_role("heading", level=1)).to_have_text("train/0/q1")
    page.keyboard.press("/")
    page.keyboard.type('"answer 3"')
    page.keyboard.press("Enter")
    expect(page.locator("mark").first).to_have_text("answer 3")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("train/0/q1/1")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("g")
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs")


@pytest.mark.slow
def test_the_theme_is_kept(page: Page, inspector: str) -> None:
    opened(page, inspector, RECORD)
    for theme in ("light", "dark"):
        page.get_by_role("button", name="Theme").click()
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
    page.reload()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    opened(page, inspector, RECORD)
    assert findings(page) == []
    page.get_by_role("button", name="Theme: dark").click()


def test_news_arrive_and_sampling_is_paused_from_the_page(
    page: Page, inspector: str, run_uri: str
) -> None:
    async def work() -> bool:
        async with TrajectoryStore.connect(run_uri) as store:
            run = await store.runs.get()
            assert run is not None
            await store.figures.put_step("trainer", step_figures(4))
            await store.runs.set_admission(run.admitted_groups + 1)
            return run.control.sampling_paused

    opened(page, inspector, f"/runs/{RUN}")
    page.get_by_role("button", name="Pause sampling").click()
    expect(page.get_by_text("sampling paused", exact=True)).to_be_visible()
    assert run_elsewhere(work())
    expect(page.get_by_role("link", name="Step 4,")).to_be_visible()
    page.get_by_role("button", name="Resume sampling").click()
    expect(page.get_by_role("button", name="Pause sampling")).to_be_visible()
    page.get_by_label("Control").select_option("max_staleness")
    page.get_by_label("Value").fill("-1")
    page.get_by_role("button", name="Set").click()
    expect(page.get_by_role("alert")).to_contain_text("max_staleness")


def test_the_diff_of_two_versions_leads_from_a_flip_to_its_record(
    page: Page, inspector: str
) -> None:
    opened(page, inspector, f"/runs/{RUN}")
    page.get_by_role("link", name="Policy diffs").click()
    expect(page.get_by_label("Comparison")).to_have_text("0 → 1, where score < 0.5")
    first = page.get_by_role("region", name="Choices").get_by_role("row").nth(1)
    expect(first).to_contain_text("look.up")
    expect(first).to_contain_text("0.7500.500\u22120.2500")
    flip = page.get_by_role("region", name="Flips").get_by_role("row").nth(1)
    expect(flip).to_contain_text("<script>")
    expect(flip).to_contain_text("0.25 → 0.75")
    assert page.title() == f"Policy diffs of {RUN} · AgentRL"
    flip.get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(FORKED_RECORD)


def test_a_fork_is_shown_beside_its_parent_and_another_can_be_asked_for(
    page: Page, inspector: str
) -> None:
    opened(page, inspector, f"/runs/{RUN}/record?id={quote(FORKED_RECORD, safe='')}")
    forks = page.get_by_role("region", name="Forks")
    expect(forks).to_contain_text("version 1, edited messages, temperature 0.5")
    expect(forks).to_contain_text("a forked answer <script>")
    turn = page.get_by_role("region", name="Turn 1")
    turn.get_by_role("button", name="Fork here").click()
    form = page.get_by_label("Fork at turn 1")
    form.get_by_label("tool lookup").fill("18")
    form.get_by_label("Rollouts").fill("2")
    assert findings(page) == []
    form.get_by_role("button", name="Continue from here").click()
    expect(page.get_by_role("alert")).to_contain_text("configuration is not in output/")
    expect(form.get_by_label("Rollouts")).to_have_value("2")
    forks.get_by_role("link", name="0", exact=True).click()
    expect(page.get_by_text("fork, excluded from training")).to_be_visible()
    expect(page.get_by_text("from the parent record")).to_have_count(1)
    page.get_by_role("link", name="train/0/q0", exact=True).click()
    node = page.locator(".node.forked")
    expect(node).to_contain_text("of forks")
    expect(page.locator(".node.diverges")).to_contain_text("scores diverge here")
    expect(page.get_by_text("Colors show advantages")).to_be_visible()
    page.get_by_role("link", name="rollout 0, turn 1").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(FORKED_RECORD)


@pytest.mark.slow
def test_failed_questions_are_tried_again_from_the_page(
    page: Page, inspector: str, run_uri: str
) -> None:
    async def num_tasks() -> int:
        async with TrajectoryStore.connect(run_uri) as store:
            return await store.tasks.count()

    before = run_elsewhere(num_tasks())
    opened(page, inspector, f"/runs/{RUN}")
    retry = page.get_by_role("button", name="Retry failed questions")
    retry.click()
    expect(page.get_by_text("1 group was added for a retry.")).to_be_visible()
    assert run_elsewhere(num_tasks()) == before + 1
    retry.click()
    expect(page.get_by_text("All of them have already been added.")).to_be_visible()
    assert run_elsewhere(num_tasks()) == before + 1


def test_another_port_receives_nothing_from_the_browser(browser: Browser, inspector: str) -> None:
    received: list[str] = []

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append(f"{self.path} {self.headers}")
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{inspector}/?token={TOKEN}")
    expect(page.get_by_role("link", name=RUN)).to_be_visible()
    assert page.url == f"{inspector}/"
    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        assert page.evaluate("() => localStorage.length") == 0
        server.shutdown()
    assert received
    assert not any("cookie" in one.lower() or TOKEN in one for one in received)
    context.close()


def test_a_stranger_sees_nothing(browser: Browser, inspector: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{inspector}/runs/{RUN}?token=guessed")
    expect(page.locator("body")).to_contain_text("requires a token")
    # A page of another origin gets no answer, even where the reader has the token.
    page.goto(f"{inspector}/?token={TOKEN}")
    page.goto("data:text/html,<p>elsewhere</p>")
    asked = "(url) => fetch(url, {credentials: 'include'}).then(() => 'read', () => 'refused')"
    assert page.evaluate(asked, f"{inspector}/api/runs") == "refused"
    context.close()
