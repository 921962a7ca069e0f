"""Measures the response times of the inspector's pages on a run of a million turns.

    python benchmarks/ui.py --out benchmarks/results/ui.json

The run of `benchmarks/growth.py` with eight turns per record is written in bulk, the words of its
turns are indexed, and the pages' requests are sent over HTTP to an `agentrl ui` in a separate
process. `first_answer_seconds_max` is the slowest page: its first answer from an inspector that was
just started, the shortest of three, because other work on the machine only adds time.
`search_seconds_max` is the slowest search for words that occur once, in every eighth text and in
all texts. In one more round, mongod logs the plan of every query: `collection_scans` names the
collections that a query read in full, apart from the run's single document and its processes.
"""

import argparse
import asyncio
import functools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import growth
import httpx

from agentrl.schema import DispatchedSamplingTask, SamplingParams, ToolCall, ToolResult, VersionSpan
from agentrl.store import TrajectoryStore
from agentrl.store.documents.codec import Document
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
        started = time.monotonic()
        await store.browse.index_turns()
        print(f"words of turns indexed in {time.monotonic() - started:.0f} s", file=sys.stderr)
        return await store.database.turns.estimated_document_count()


async def answers(address: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each page's first answers, and of each search."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    pages: dict[str, float] = {}
    searches: dict[str, float] = {}
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=60) as client:

        async def seconds(path: str, parameters: dict[str, Any]) -> float:
            started = time.monotonic()
            response = await client.get(f"{path}?{urlencode(parameters)}")
            assert response.status_code == 200, (path, response.text[:300])
            return time.monotonic() - started

        pages["runs"] = await seconds("/api/runs", {})
        for name, requests in PAGES.items():
            # The slowest: a page requests its parts concurrently and shows each as it arrives.
            durations = [
                await seconds(f"/api/runs/{RUN}/{part}", parameters)
                for part, parameters in requests
            ]
            pages[name] = max(durations)
        for words in SEARCHES:
            searches[words] = await seconds(f"/api/runs/{RUN}/search", {"q": words})
    return rounded(pages), rounded(searches)


def rounded(found: dict[str, float]) -> dict[str, float]:
    """Return the seconds rounded to milliseconds."""
    return {name: round(seconds, 3) for name, seconds in found.items()}


async def collection_scans(uri: str, since: datetime) -> list[str]:
    """Return the namespaces of logged queries that read a whole collection."""
    async with TrajectoryStore.connect(uri) as store:
        query = {"planSummary": "COLLSCAN", "ts": {"$gt": since}, "appName": "agentrl"}
        found = store.database.handle["system.profile"].find(query)
        small = ("runs", "samplers", "inference_services", "policies", "system.profile")
        return sorted(
            {one["ns"] async for one in found if one["ns"].partition(".")[2] not in small}
        )


async def profile(uri: str, level: int) -> None:
    """Let mongod log every query of the run with its plan, or stop it."""
    async with TrajectoryStore.connect(uri) as store:
        await store.database.handle.command("profile", level)


def of_inspector(
    command: list[str], folder: str, environment: dict[str, str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the answers of an inspector that was just started."""
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        found = re.match(r"(http://[^/]+)", process.stdout.readline())
        assert found is not None
        seconds = asyncio.run(answers(found[1]))
        process.terminate()
    return seconds


def measure(num_turns: int) -> dict[str, Any]:
    """Write the run and measure it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedMongo(Path(folder) / "mongo") as mongo,
    ):
        uri = mongo.uri(RUN)
        started = time.monotonic()
        num = asyncio.run(write(uri, num_turns))
        print(f"{num} turns after {time.monotonic() - started:.0f} s", file=sys.stderr)
        environment = {**os.environ, "MONGODB_URI": uri, "AGENTRL_UI_TOKEN": TOKEN}
        command = [sys.executable, "-m", "agentrl", "ui"]
        since = datetime.now(UTC)
        asyncio.run(profile(uri, 2))
        of_inspector(command, folder, environment)
        asyncio.run(profile(uri, 0))
        rounds = [of_inspector(command, folder, environment) for _ in range(ROUNDS)]
        pages, searches = (
            {name: min(one[part][name] for one in rounds) for name in rounds[0][part]}
            for part in (0, 1)
        )
        return {
            "turns": num,
            "first_answer_seconds_max": max(pages.values()),
            "search_seconds_max": max(searches.values()),
            "collection_scans": asyncio.run(collection_scans(uri, since)),
            "first_answer_seconds": pages,
            "search_seconds": searches,
        }


def main() -> None:
    """Measure, and print or write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.turns)
    result["machine"] = {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    if arguments.out is not None and arguments.out.exists():
        stored = json.loads(arguments.out.read_text(encoding="utf-8"))
        result |= {name: stored[name] for name in stored if name.startswith("step_rate")}
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
