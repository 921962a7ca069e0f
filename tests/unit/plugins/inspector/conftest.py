"""One seeded run, one inspector and one browser for all tests of the pages.

Playwright's synchronous interface keeps an event loop running in this thread for as long as the
browser is open: a module that uses it has no asynchronous tests, and its own ones run elsewhere.
"""

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from support.inspected import seed, seed_diff, seed_fork
from support.patience import PATIENCE

from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

T = TypeVar("T")

RUN = "inspected"
TOKEN = "token-of-the-tests"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LONGEST_MS = 30_000
"""Time for an answer to appear, on a machine that others work on as well."""
NO_CHROMIUM = "needs a browser: apt-get install chromium (scripts/install_desktop)"


def run_elsewhere(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread without an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    expect.set_options(timeout=LONGEST_MS)
    with sync_playwright() as playwright:
        # The tests may run as root, whose browser has no sandbox.
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def run_uri(mongod: EmbeddedMongo) -> Iterator[str]:
    """The connection string of a seeded run."""
    uri = mongod.uri(RUN)

    async def fill() -> None:
        async with TrajectoryStore.connect(uri) as store:
            await seed(store, RUN)
            await seed_fork(store)
            await seed_diff(store)

    async def drop() -> None:
        async with TrajectoryStore.connect(uri) as store:
            await store.drop_database()

    run_elsewhere(fill())
    yield uri
    run_elsewhere(drop())


@contextmanager
def opened_inspector(folder: Path, *flags: str, **variables: str) -> Iterator[str]:
    """Yield the address that `agentrl ui` prints; it ends with the block, even one that fails."""
    environment = {name: value for name, value in os.environ.items() if name != "MONGODB_URI"}
    log = folder / "ui.log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            [sys.executable, "-m", "agentrl", "ui", *flags],
            cwd=folder,
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address, log.read_text()
            yield address
            process.terminate()
            assert process.wait(PATIENCE) == 0
            assert "Traceback" not in log.read_text()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def inspector(run_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `agentrl ui --allow_control` over the seeded run, without the token."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        flags = ("--port", str(probe.getsockname()[1]), "--allow_control")
    folder = tmp_path_factory.mktemp("inspector")
    with opened_inspector(folder, *flags, MONGODB_URI=run_uri, AGENTRL_UI_TOKEN=TOKEN) as address:
        found = re.match(r"(http://127\.0\.0\.1:\d+)/\?token=", address)
        assert found is not None, address
        yield found[1]


@pytest.fixture(scope="module")
def visitor(browser: Browser, inspector: str) -> Iterator[BrowserContext]:
    """A browser that has opened the printed address."""
    context = browser.new_context(viewport={"width": 1280, "height": 720})
    context.set_default_timeout(LONGEST_MS)
    page = context.new_page()
    page.goto(f"{inspector}/?token={TOKEN}")
    page.close()
    yield context
    context.close()


@pytest.fixture
def page(visitor: BrowserContext) -> Iterator[Page]:
    """A tab that fails the test if a script failed in it, or something was refused to it."""
    opened = visitor.new_page()
    said: list[str] = []
    opened.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: said.append(f"error: {error}"))
    yield opened
    opened.close()
    wrong = [line for line in said if line.startswith(("error", "warning"))]
    # Chromium notes every refused question; tests of wrong input look at what the page says of it.
    assert not [line for line in wrong if "status of 400" not in line], said
