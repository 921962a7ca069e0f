"""Pages with much on them: the browser goes on answering its reader."""

import re
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from growth import GENERATIONS, write_run
from playwright.sync_api import Browser, Page, expect
from support.stored import make_task, make_turn
from unit.plugins.inspector.conftest import TOKEN, opened_inspector, run_elsewhere

from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RUN = "large"
ROWS = 5_000
TURNS, TOKENS = 100, 1_300
WHOLE_TOKENS = 131_072
LONGEST_BLOCK_MS = 1_000
"""Longest time without an answer to the reader, on a machine that others work on as well."""
LISTEN = """() => {
    window.blocks = [];
    new PerformanceObserver((list) => window.blocks.push(...list.getEntries().map((e) => e.duration)))
        .observe({ type: "longtask", buffered: true });
}"""


async def _fill(uri: str) -> None:
    await write_run(uri, int(ROWS * 1.3) * GENERATIONS)
    async with TrajectoryStore.connect(uri) as store:
        tasks = [make_task(10**6 + number, num_generations=1) for number in range(2)]
        await store.tasks.add(tasks)
        for task, num_turns, num_tokens in zip(
            tasks, (TURNS, 1), (TOKENS, WHOLE_TOKENS), strict=True
        ):
            claimed = await store.records.claim(
                "me", lease_seconds=60, admitted_groups=10**9, max_attempts=1, task_id=task.id
            )
            assert claimed is not None
            record = claimed[0]
            for index in range(num_turns):
                text = f"turn {index} " + "word " * num_tokens
                turn = make_turn(record, index, num_added=10, num_output=num_tokens, text=text)
                ids = np.arange(num_tokens, dtype=np.int32) % 500
                await store.turns.append(turn.model_copy(update={"output_ids": ids}), record.fence)


@pytest.fixture(scope="module")
def page(
    browser: Browser, mongod: EmbeddedMongo, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    """A tab with the token, before an inspector of the large run."""
    uri = mongod.uri(RUN)
    run_elsewhere(_fill(uri))
    variables = {"MONGODB_URI": uri, "AGENTRL_UI_TOKEN": TOKEN}
    folder = tmp_path_factory.mktemp("large")
    with opened_inspector(folder, "--run_name", RUN, **variables) as address:
        found = re.match(r"(http://[^/]+)", address)
        assert found is not None
        context = browser.new_context(viewport={"width": 1280, "height": 720}, base_url=found[1])
        context.set_default_timeout(60_000)
        context.add_init_script(f"({LISTEN})()")
        made = context.new_page()
        made.goto(f"/?token={TOKEN}")
        yield made
        context.close()


def longest_block(page: Page, capsys: pytest.CaptureFixture[str], what: str) -> float:
    """Return the longest time that the page did not answer; print it as a figure."""
    blocks: list[float] = page.evaluate("() => window.blocks")
    with capsys.disabled():
        text = f"{what}: longest block {max(blocks, default=0):.0f} ms, {len(blocks)} over 50 ms"
        sys.stdout.write(f"\n{text}\n")
    return max(blocks, default=0.0)


def test_five_thousand_rows_are_scrolled_through(
    page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    page.goto(f"/runs/{RUN}/groups")
    rows = page.get_by_role("region", name="Groups")
    expect(page.locator(".group-row").first).to_be_visible()
    deadline = time.monotonic() + 300
    shown = 0
    while shown < ROWS:
        assert time.monotonic() < deadline, shown
        rows.evaluate("(box) => { box.scrollTop = box.scrollHeight; }")
        shown = int((page.get_by_role("status").inner_text()).split()[0].replace(",", ""))
    assert page.locator(".group-row").count() < 100
    rows.evaluate("(box) => { box.scrollTop = 0; }")
    expect(page.locator(".group-row").first).to_be_visible()
    assert longest_block(page, capsys, f"{shown} rows") < LONGEST_BLOCK_MS


@pytest.mark.parametrize("number", [0, 1])
def test_a_record_of_a_hundred_thousand_tokens_is_read(
    page: Page, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    page.goto(f"/runs/{RUN}/record?id=train/0/q{10**6 + number}/0&colour=logprob")
    expect(page.locator(".token").first).to_be_visible()
    if number:
        for num in range(2, 5):
            page.get_by_role("button", name="Show more").last.click()
            expect(page.locator(".token")).to_have_count(8192 * num)
    else:
        for _ in range(40):
            page.mouse.wheel(0, 3000)
            page.wait_for_timeout(20)
        expect(page.locator(".token").first).to_be_visible()
    page.keyboard.press("c")
    expect(page.get_by_label("Color tokens by")).to_have_value("version")
    what = f"{TURNS} turns of {TOKENS} tokens" if not number else f"{WHOLE_TOKENS} tokens"
    assert longest_block(page, capsys, what) < LONGEST_BLOCK_MS
