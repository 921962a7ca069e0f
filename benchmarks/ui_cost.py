"""What `agentrl ui` with an open page costs the demo that it watches.

    python benchmarks/ui_cost.py --pairs 8 --out benchmarks/results/ui.json

Runs of the demo alternate: alone, and with an inspector and a browser that shows its page. Each pair
begins with the other of the two. `step_rate_ratio` is the steps a second with the page over those
without: the median of the pairs, each from the first steps' end to the last step. The browser runs on
the same cores. The figures join those that `benchmarks/ui.py` has written.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.machine import machine
from playwright.sync_api import sync_playwright

from agentrl.store.private_mongod import running_uri

RUN = "watched"
WARM_UP = 3
"""Steps before which processes still start and caches fill."""


def demo(folder: Path, num_steps: int) -> "subprocess.Popen[bytes]":
    """Start the demo in a folder."""
    command = [sys.executable, "-m", "agentrl", "run", "--run_name", RUN]
    command += ["--max_steps", str(num_steps), "--mongo_port", "0", "--eval_strategy", "no"]
    with (folder / "run.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)


@contextmanager
def page_of(folder: Path) -> Iterator[None]:
    """Show the run's page for the length of the block."""
    data = folder / ".agentrl" / "mongo" / RUN
    while running_uri(data) is None:  # it is the run that serves its data
        time.sleep(0.1)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium is not None, "needs a browser (scripts/install_browser)"
    command = [sys.executable, "-m", "agentrl", "ui", "--run_name", RUN]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as ui:
        assert ui.stdout is not None
        address = ui.stdout.readline().strip()
        assert re.match("http://", address), address
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page()
            page.set_default_timeout(120_000)
            page.goto(address)
            page.get_by_text("live", exact=True).wait_for()
            yield
            browser.close()
        ui.terminate()


def steps_a_second(num_steps: int, *, watched: bool) -> float:
    """Run the demo and return its pace after the first steps."""
    with tempfile.TemporaryDirectory(prefix="agentrl-ui-cost-") as name:
        folder = Path(name)
        run = demo(folder, num_steps)
        if watched:
            with page_of(folder):
                status = run.wait()
        else:
            status = run.wait()
        assert status == 0, (folder / "run.log").read_text()[-2000:]
        lines = (folder / "output" / RUN / "metrics.jsonl").read_text().splitlines()
        steps: list[dict[str, Any]] = [json.loads(line) for line in lines]
        times = [float(step["time"]) for step in steps if "loss" in step]
        return (len(times) - WARM_UP) / (times[-1] - times[WARM_UP - 1])


def main() -> None:
    """Measure, print, and add the result to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pairs: list[dict[str, float]] = []
    for number in range(arguments.pairs):
        pair = {}
        for watched in (False, True) if number % 2 == 0 else (True, False):
            pace = steps_a_second(arguments.steps, watched=watched)
            pair["watched" if watched else "alone"] = round(pace, 4)
        pair["ratio"] = round(pair["watched"] / pair["alone"], 4)
        pairs.append(pair)
        print(json.dumps(pair), file=sys.stderr, flush=True)
    ratio = statistics.median(pair["ratio"] for pair in pairs)
    result = {
        "step_rate_ratio": round(ratio, 4),
        "step_rates": pairs,
        "step_rate_machine": machine(),
    }
    print(json.dumps(result, indent=2))
    if arguments.out is not None:
        known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        arguments.out.write_text(json.dumps({**known, **result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
