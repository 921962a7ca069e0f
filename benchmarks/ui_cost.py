"""Measures what `agentrl ui` with an open page costs a running demo, in processor time.

    python benchmarks/ui_cost.py --pairs 10 --out benchmarks/results/ui.json

Steps per second of two runs differ by a third on a shared machine, which hides anything as small as
the inspector's share. Neighbors do not disturb processor time. One run of the demo is observed in
windows that alternate between an empty tab and the run's own page, which requests the most: each
window counts the processor time of the run's processes, its mongod, the inspector and the browser.

`cost_share` is the inspector's processor time plus mongod's increase over the adjacent windows,
relative to the processor time of the whole run. On a machine whose cores are all busy, a run loses
what others take: `step_rate_ratio` is 1 minus that share, and no lower if cores are idle.
`cost_share_error` is the standard error over the pairs of windows. The browser belongs to the
reader, so its share is reported separately. `work_ratio` is a cross-check: model calls of the run
per second of its own processor time with the page, over those without. The figures are added to
those of `benchmarks/ui.py`.
"""

import argparse
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from harness.machine import machine
from playwright.sync_api import Page, sync_playwright
from pymongo import MongoClient

from agentrl.store.private_mongod import running_uri

RUN = "watched"
WARM_UP = 3
"""Warm-up steps, in which processes start and caches fill."""
SETTLE_SECONDS = 1.5
"""Time from the opening of a page to the window; opening it is a one-time cost."""


@contextmanager
def demo(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the demo in a folder until the block ends."""
    command = [sys.executable, "-m", "agentrl", "run", "--run_name", RUN]
    command += ["--max_steps", "10000", "--num_train_epochs", "100", "--mongo_port", "0"]
    command += ["--eval_strategy", "no"]
    log_path = folder / "run.log"
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as run,
    ):
        try:
            yield run
        finally:
            run.terminate()


@contextmanager
def inspector(folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Serve the run's pages; yields the process and the address of the run."""
    command = [sys.executable, "-m", "agentrl", "ui", "--run_name", RUN]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as ui:
        assert ui.stdout is not None
        address = ui.stdout.readline().strip()
        assert re.match("http://", address), address
        yield psutil.Process(ui.pid), address
        ui.terminate()


def seconds_by_role(run: int, ui: psutil.Process) -> dict[str, float]:
    """Return the processor time that each role has used so far."""
    found: defaultdict[str, float] = defaultdict(float)
    for process in psutil.Process(run).children(recursive=True):
        found["mongod" if process.name() == "mongod" else "run"] += _seconds(process)
    found["ui"] = _seconds(ui)
    for process in psutil.Process().children(recursive=True):
        if process.name().startswith("chrom"):
            found["browser"] += _seconds(process)
    return found


def _seconds(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def window(
    page: Page, address: str, seconds: float, run: int, ui: psutil.Process, calls: Any
) -> dict[str, float]:
    """Return processor seconds per second by role, and model calls per second, with a page open."""
    page.goto(address)
    time.sleep(SETTLE_SECONDS)
    started, before = time.monotonic(), seconds_by_role(run, ui)
    num_before = calls.estimated_document_count()
    time.sleep(seconds)
    passed, after = time.monotonic() - started, seconds_by_role(run, ui)
    num_calls = calls.estimated_document_count() - num_before
    rates = {role: (after[role] - before[role]) / passed for role in after}
    return {**rates, "calls": num_calls / passed}


def cost_share(pair: dict[str, dict[str, float]]) -> float:
    """Return the inspector's share of a run's processor time in one pair of windows."""
    closed, opened = pair["closed"], pair["open"]
    added_seconds = opened["ui"] - closed["ui"] + opened["mongod"] - closed["mongod"]
    return added_seconds / (closed["run"] + closed["mongod"])


def work_ratio(pair: dict[str, dict[str, float]]) -> float:
    """Return the model calls per processor second with the page over those without."""
    closed, opened = pair["closed"], pair["open"]
    return opened["calls"] / opened["run"] / (closed["calls"] / closed["run"])


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the pairs and its standard error."""
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def measured(folder: Path, num_pairs: int, seconds: float) -> list[dict[str, dict[str, float]]]:
    """Run the demo and return the rates of each pair of windows."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium is not None, "needs a browser (scripts/install_desktop)"
    pairs = []
    with demo(folder) as run:
        metrics = folder / "output" / RUN / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < WARM_UP:
            assert run.poll() is None, (folder / "run.log").read_text()[-2000:]
            time.sleep(0.2)
        uri = running_uri(folder / ".agentrl" / "mongo" / RUN)
        assert uri is not None
        with (
            MongoClient[dict[str, Any]](uri) as client,
            inspector(folder) as (ui, address),
            sync_playwright() as playwright,
        ):
            calls = client[RUN]["turns"]
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 720})
            page.set_default_timeout(120_000)
            page.goto(address)
            page.get_by_text("live", exact=True).wait_for()
            run_page = page.url
            for number in range(num_pairs):
                pair = {}
                for kind in ("closed", "open") if number % 2 == 0 else ("open", "closed"):
                    place = run_page if kind == "open" else "about:blank"
                    pair[kind] = window(page, place, seconds, run.pid, ui, calls)
                pairs.append(pair)
                progress = {
                    kind: {k: round(v, 4) for k, v in one.items()} for kind, one in pair.items()
                }
                print(json.dumps(progress), file=sys.stderr, flush=True)
            browser.close()
    return pairs


def main() -> None:
    """Measure, print, and add the result to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=12.0, help="seconds per window")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory(prefix="agentrl-ui-cost-") as name:
        pairs = measured(Path(name), arguments.pairs, arguments.seconds)
    share, share_error = mean_and_error([cost_share(pair) for pair in pairs])
    work, work_error = mean_and_error([work_ratio(pair) for pair in pairs])
    browser = [
        (pair["open"]["browser"] - pair["closed"]["browser"])
        / (pair["closed"]["run"] + pair["closed"]["mongod"])
        for pair in pairs
    ]
    rates = {
        kind: {
            role: round(statistics.mean(pair[kind][role] for pair in pairs), 4)
            for role in ("run", "mongod", "ui", "browser", "calls")
        }
        for kind in ("closed", "open")
    }
    result = {
        "step_rate_ratio": round(1 - share, 4),
        "cost_share": round(share, 4),
        "cost_share_error": round(share_error, 4),
        "browser_share": round(statistics.mean(browser), 4),
        "work_ratio": round(work, 4),
        "work_ratio_error": round(work_error, 4),
        "cost_windows": {"pairs": len(pairs), "seconds": arguments.seconds, "a_second": rates},
        "cost_machine": before,
    }
    print(json.dumps(result, indent=2))
    if arguments.out is not None:
        stored = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        arguments.out.write_text(json.dumps({**stored, **result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
