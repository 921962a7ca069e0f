"""Measures the inspector: its pages on a run of a million turns, and its cost to a running demo.

    python benchmarks/ui.py
    python benchmarks/ui.py --only cost

`pages`: the run of `benchmarks/growth.py` with eight turns per record is written in bulk, the words of
its turns are indexed, and the pages' requests are sent over HTTP to an `agentrl ui` in a separate
process. `first_answer_seconds_max` is the slowest page: its first answer from an inspector that was
just started, the shortest of three, because other work on the machine only adds time.
`search_seconds_max` is the slowest search for words that occur once, in every eighth text and in
all texts.

`cost`: steps per second of two runs differ by a third on a shared machine, which hides anything as small
as the inspector's share. Neighbors do not disturb processor time. One run of the demo is observed in
windows that alternate between an empty tab and the run's own page, which requests the most: each
window counts the processor time of the run's processes, its mongod and the inspector. `cost_share` is
the inspector's processor time plus mongod's increase over the adjacent windows, relative to the
processor time of the whole run. On a machine whose cores are all busy, a run loses what others take:
`step_rate_ratio` is 1 minus that share, and no lower if cores are idle. `cost_share_error` is the
standard error over the pairs of windows.
"""

import argparse
import asyncio
import functools
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import growth
import httpx
import psutil
from harness.results import keep, machine, parser
from playwright.sync_api import sync_playwright

from agentrl.schema import (
    DispatchedSamplingTask,
    RatioStats,
    SamplingParams,
    ToolCall,
    ToolResult,
    TurnTraining,
    TurnWorth,
    VersionSpan,
)
from agentrl.store import TrajectoryStore
from agentrl.store.documents.codec import Document, to_document
from agentrl.store.documents.packed_turns import ToolsPacker, pack
from agentrl.store.private_mongod import EmbeddedMongo

TURNS = 8
RUN = "growth"
TOKEN = "benchmark"
NUM_STEPS = 2000
ROUNDS = 3
COLOURS = ("amber", "blue", "cyan", "green", "indigo", "mauve", "ochre", "pink")
RECORD = {"id": "train/0/q7/3"}
PAGES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "run": [("overview", {}), ("curves", {}), ("errors", {})],
    "groups": [("groups", {"newest": 1})],
    "groups by score": [("groups", {"newest": 1, "min_score": 0.5, "outcome": "answered"})],
    "groups by spread": [("groups", {"min_spread": 0.5})],
    "groups by what none has": [("groups", {"min_tokens": 10**6})],
    "groups by tool": [("groups", {"newest": 1, "tool": "lookup"})],
    "groups by text": [("groups", {"text": "77"})],
    "group": [("group", {"task": "train/0/q7"})],
    "record": [("record", RECORD), ("tokens", {"turn": f"{RECORD['id']}/1/0"})],
    "step": [("step", {"step": 500})],
    "distributions": [("distributions", {})],
    "failures": [("failures", {}), ("errors", {})],
    "questions": [("questions", {})],
    "worst decisions": [("decisions", {})],
    "evaluations": [("questions", {"split": "eval"})],
    "live": [("live", {}), ("tabs", {})],
}
SEARCHES = ("item 4711", "amber", '"the shelf is"', "sold", "nowhere-to-be-found")


@functools.cache
def template() -> Document:
    """Return the stored form of a turn without the fields that differ between turns."""
    turn = DispatchedSamplingTask(
        id="",
        record_id="",
        task_id="",
        attempt=1,
        index=0,
        added_ids=list(range(40)),
        output_ids=list(range(20)),
        output_logprobs=[-0.5] * 20,
        version_spans=(VersionSpan(version=1, start=0, end=20),),
        tool_calls=(ToolCall(id="c", name="lookup", arguments={"q": "figs"}),),
        tool_results=(ToolResult(call_id="c", name="lookup", content="", seconds=0.1),),
        finish_reason="stop",
        sampling_params=SamplingParams(),
    )
    return pack(turn, ToolsPacker())[0]


def with_turns(num_groups: int) -> Iterator[tuple[str, Document]]:
    """Yield the documents of the run with the turns of its records."""
    for name, document in growth.documents(num_groups):
        if name == "tasks":
            yield name, document
            continue
        record_id = document["_id"]
        turns = [f"{record_id}/1/{index}" for index in range(TURNS)]
        if name == "record_data":
            yield name, {**document, "turn_ids": turns}
        elif document["status"] == "pending":
            yield name, document
        else:
            yield name, {**document, "turns": turns, "tool_names": ["lookup"]}
            for index, turn_id in enumerate(turns):
                yield "turns", _turn(document, turn_id, index)
                yield "turn_training", _training(document, turn_id, index)


def _turn(record: Document, turn_id: str, index: int) -> Document:
    number = record["order"] * TURNS + index
    result = {
        **template()["tool_results"][0],
        "content": f"the shelf is {COLOURS[number % TURNS]}, price {number % 997} zloty",
    }
    return {
        **template(),
        "_id": turn_id,
        "record_id": record["_id"],
        "task_id": record["task_id"],
        "index": index,
        "parent": index - 1 if index else None,
        "shared_len": 60 * index,
        "output_text": f"I look where item {record['order']} is sold, turn {index}",
        "tool_results": [result],
    }


@functools.cache
def training_template() -> Document:
    """Return the stored form of a turn's training without the fields that differ between turns."""
    training = TurnTraining(
        id="",
        consumer="trainer",
        step=1,
        turn_id="",
        record_id="",
        task_id="",
        num_tokens=20,
        num_trained_tokens=20,
        advantage=0.5,
        worth=TurnWorth(after=0.0, change=0.0, num_leaves=1, is_decision=True),
        staleness=0,
        ratio=RatioStats(mean=1.0, std=0.1, min=0.5, max=2.0),
    )
    return to_document(training)


def _training(record: Document, turn_id: str, index: int) -> Document:
    number = record["order"] * TURNS + index
    step = 1 + record["order"] % NUM_STEPS
    template = training_template()
    return {
        **template,
        "_id": f"trainer/{step}/{turn_id}",
        "step": step,
        "turn_id": turn_id,
        "record_id": record["_id"],
        "task_id": record["task_id"],
        "worth": {**template["worth"], "change": (number % 997) / 997 - 0.5},
    }


def figures(step: int) -> dict[str, Any]:
    """Return the figures of a step."""
    numbers = {"reward_mean": step / NUM_STEPS, "loss": 0.1, "entropy": 0.5, "grad_norm": 1.0}
    return {"step": step, **numbers, "seconds": {"wait_samples": 1.0, "forward_backward": 2.0}}


async def write(uri: str, num_turns: int) -> int:
    """Write the run; return its number of turns."""
    share = 1 - growth.PENDING_SHARE
    num_records = round(num_turns / TURNS / share)
    num_groups = num_records // growth.GENERATIONS
    await growth.write_run(uri, num_records, with_turns(num_groups))
    async with TrajectoryStore.connect(uri) as store:
        steps = [figures(step) for step in range(1, NUM_STEPS + 1)]
        await store.figures.rewind("trainer", NUM_STEPS, steps, [])
        await store.browse.index_turns()
        return await store.database.turns.estimated_document_count()


async def answers(address: str) -> dict[str, dict[str, float]]:
    """Return the seconds of each page's first answers, and of each search."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=60) as client:

        async def seconds(path: str, parameters: dict[str, Any]) -> float:
            started = time.monotonic()
            response = await client.get(f"/api/runs{path}?{urlencode(parameters)}")
            assert response.status_code == 200, (path, response.text[:300])
            return round(time.monotonic() - started, 3)

        pages = {"runs": await seconds("", {})}
        for name, requests in PAGES.items():
            # The slowest: a page requests its parts concurrently and shows each as it arrives.
            pages[name] = max([await seconds(f"/{RUN}/{part}", of) for part, of in requests])
        return {
            "first_answer": pages,
            "search": {words: await seconds(f"/{RUN}/search", {"q": words}) for words in SEARCHES},
        }


@contextmanager
def inspector(folder: Path, *flags: str, **environment: str) -> Iterator[tuple[int, str]]:
    """Run `agentrl ui`; yields its process's number and the address that it names."""
    with subprocess.Popen(
        [sys.executable, "-m", "agentrl", "ui", *flags],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().strip()
        process.terminate()


def pages(given: argparse.Namespace) -> dict[str, Any]:
    """Write the run and measure its pages."""
    with tempfile.TemporaryDirectory() as name, EmbeddedMongo(Path(name) / "mongo") as mongo:
        uri = mongo.uri(RUN)
        num_turns = asyncio.run(write(uri, given.turns))
        rounds = []
        for _ in range(ROUNDS + 1):
            with inspector(Path(name), MONGODB_URI=uri, AGENTRL_UI_TOKEN=TOKEN) as (_, address):
                base = re.match(r"http://[^/]+", address)
                assert base is not None, address
                rounds.append(asyncio.run(answers(base[0])))
    del rounds[0]  # it fills mongod's cache
    found: dict[str, Any] = {"turns": num_turns}
    for kind, names in rounds[0].items():
        shortest = {name: min(one[kind][name] for one in rounds) for name in names}
        found |= {f"{kind}_seconds_max": max(shortest.values()), f"{kind}_seconds": shortest}
    return found


# --- the cost of an open page -----------------------------------------------------------------

DEMO = """--run_name watched --max_steps 10000 --num_train_epochs 100 --mongo_port 0
    --eval_strategy no"""
WARM_UP = 3
"""Steps in which processes start and caches fill."""
SETTLE_SECONDS = 1.5
"""Time from the opening of a page to the window; opening it is a one-time cost."""


@contextmanager
def demo(folder: Path) -> Iterator[int]:
    """Run the demo in a folder; yields its process's number once it is warm."""
    command = [sys.executable, "-m", "agentrl", "run", *DEMO.split()]
    steps, said = folder / "output/watched/metrics.jsonl", folder / "run.log"
    with (
        said.open("wb") as log,
        subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as run,
    ):
        try:
            while not steps.exists() or len(steps.read_text().splitlines()) < WARM_UP:
                assert run.poll() is None, said.read_text()[-2000:]
                time.sleep(0.2)
            yield run.pid
        finally:
            run.terminate()


def seconds_by_role(run: int, ui: int) -> dict[str, float]:
    """Return the processor time that each role has used so far."""
    found: defaultdict[str, float] = defaultdict(float)
    for process in psutil.Process(run).children(recursive=True):
        role = "mongod" if process.name() == "mongod" else "run"
        found[role] += sum(process.cpu_times()[:2])
    found["ui"] = sum(psutil.Process(ui).cpu_times()[:2])
    return found


def window(seconds: float, run: int, ui: int) -> dict[str, float]:
    """Return processor seconds per second by role."""
    time.sleep(SETTLE_SECONDS)
    started, before = time.monotonic(), seconds_by_role(run, ui)
    time.sleep(seconds)
    passed, after = time.monotonic() - started, seconds_by_role(run, ui)
    return {role: (after[role] - before[role]) / passed for role in after}


def share(closed: Mapping[str, float], opened: Mapping[str, float]) -> float:
    """Return the inspector's share of a run's processor time in one pair of windows."""
    added = opened["ui"] - closed["ui"] + opened["mongod"] - closed["mongod"]
    return added / (closed["run"] + closed["mongod"])


def cost(given: argparse.Namespace) -> dict[str, Any]:
    """Run the demo and compare windows with and without an open page."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium is not None, "needs a browser (scripts/install_desktop)"
    rates: dict[str, list[dict[str, float]]] = {"closed": [], "open": []}
    with (
        tempfile.TemporaryDirectory() as name,
        demo(Path(name)) as run,
        inspector(Path(name), "--run_name", "watched") as (ui, address),
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        page.set_default_timeout(120_000)
        page.goto(address)
        page.get_by_text("live", exact=True).wait_for()
        places = {"closed": "about:blank", "open": page.url}
        for number in range(given.pairs):
            for kind in ("closed", "open") if number % 2 == 0 else ("open", "closed"):
                page.goto(places[kind])
                rates[kind].append(window(given.seconds, run, ui))
        browser.close()
    shares = list(map(share, rates["closed"], rates["open"]))
    mean = statistics.mean(shares)
    return {
        "step_rate_ratio": round(1 - mean, 4),
        "cost_share": round(mean, 4),
        "cost_share_error": round(statistics.stdev(shares) / math.sqrt(len(shares)), 4),
        "cost_windows": {"pairs": given.pairs, "seconds": given.seconds, "a_second": rates},
    }


PARTS = {"pages": pages, "cost": cost}


def main() -> None:
    """Measure the parts; the file keeps what is not measured again."""
    flags = parser(__doc__, "ui")
    flags.add_argument("--only", choices=PARTS, nargs="+", default=[*PARTS], help="these parts")
    flags.add_argument("--turns", type=int, default=1_000_000, help="of the run with many")
    flags.add_argument("--pairs", type=int, default=10, help="of windows")
    flags.add_argument("--seconds", type=float, default=12.0, help="per window")
    given = flags.parse_args()
    for part in given.only:
        about = machine()
        keep(given.out, {**PARTS[part](given), f"{part}_machine": about})


if __name__ == "__main__":
    main()
