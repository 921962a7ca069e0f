"""The CPU time of a turn outside the model: in the sampler and in mongod.

    python benchmarks/turn_cost.py

One real sampler process runs rollouts of three tool calls and an answer. The engine is scripted,
which excludes the model; tools are called over MCP, and every record is scored. The figures are the
CPU seconds of the sampler and of mongod between two moments of the run, per turn in between:
neither the start of the process nor other work on the machine counts. `commands` are MongoDB's
commands per turn, by kind; `collection_ms` are its milliseconds per turn by collection, including
waits.

`--quick` runs fewer rollouts.
"""

import asyncio
import sys
import tempfile
import time
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from harness.played import MODEL, open_store, served_by
from harness.processes import ROOT, listening_process
from harness.results import parser, report
from harness.scripted_engine import serve_script
from pymongo import AsyncMongoClient

from agentrl.renderers.renderer import Renderer
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

NUM_TOOL_CALLS = 3
GENERATIONS = 8
CONCURRENCIES = (4, 32)
"""Concurrent rollouts. Their writes are batched, so with more of them, each costs less."""
MODEL_SECONDS = 0.05
TOOL_SERVER = (sys.executable, "-m", "examples.shop.server", "--port", "{port}")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


@dataclass(frozen=True)
class Moment:
    """Costs and counts at one time."""

    at: float
    """On the monotonic clock."""
    sampler: float
    mongod: float
    others: float
    """CPU seconds of the scripted engine and the tool server."""
    turns: int
    records: int
    commands: dict[str, int]
    collections: dict[str, int]


def script(prompt: str) -> str:
    """Call a tool a few times, then answer."""
    return CALL if prompt.count("<tool_response>") < NUM_TOOL_CALLS else "<answer>7</answer>"


def cpu(pid: int) -> float:
    """Return the CPU seconds of a process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def moment(store: TrajectoryStore, mongo: EmbeddedMongo, sampler: int) -> Moment:
    """Measure everything now."""
    own = psutil.Process()
    children = {child.pid for child in own.children(recursive=True)}
    others = [own.pid, *(children - {sampler, mongo.pid})]
    spent = time.monotonic(), cpu(sampler), cpu(mongo.pid), sum(map(cpu, others))
    async with AsyncMongoClient[dict[str, Any]](mongo.uri()) as client:
        status = await client.admin.command("serverStatus")
        top = await client.admin.command("top")
    prefix = f"{store.database_name}."
    return Moment(
        *spent,
        turns=await store.database["turns"].count_documents({}),
        records=await store.database["records"].count_documents({"status": "scored"}),
        commands={
            name: counts["total"]
            for name, counts in status["metrics"]["commands"].items()
            if isinstance(counts, dict) and "total" in counts
        },
        collections={
            name.removeprefix(prefix): counts["total"]["time"]
            for name, counts in top["totals"].items()
            if name.startswith(prefix)
        },
    )


async def until_scored(store: TrajectoryStore, number: int) -> None:
    """Wait until this many records are scored."""
    while True:
        if await store.database["records"].count_documents({"status": "scored"}) >= number:
            return
        await asyncio.sleep(0.5)


async def measure(concurrency: int, num_warm: int, num_records: int) -> dict[str, Any]:
    """Run this many concurrent rollouts; return the costs per turn."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mongo = stack.enter_context(EmbeddedMongo(folder / "mongo"))
        engine = stack.enter_context(
            serve_script(Renderer.load(MODEL), script, delay_seconds=MODEL_SECONDS)
        )
        engine.requests = deque(maxlen=1)
        tools = stack.enter_context(listening_process(TOOL_SERVER))
        store = await stack.enter_async_context(open_store(mongo))
        await stack.enter_async_context(served_by(store, engine.base_url))
        await store.tasks.add(
            MCPTask(
                id=f"train/0/q{number}",
                order=number,
                num_generations=GENERATIONS,
                query=f"What does lamp {number} cost?",
                answer="7",
                scorer="exact",
            )
            for number in range(num_records // GENERATIONS)
        )
        words = [sys.executable, "-m", "agentrl", "sample", "--run_name", store.database_name]
        words += ["--db_connection_string", mongo.uri(store.database_name)]
        words += ["--model_name_or_path", str(MODEL), "--mcp_manager_url", f"{tools}/mcp"]
        words += ["--max_concurrent_samples_per_process", str(concurrency)]
        words += ["--logs_dir", str(folder / "logs")]
        sampler = await asyncio.create_subprocess_exec(*words, cwd=ROOT)
        stack.callback(sampler.kill)
        await until_scored(store, num_warm)
        first = await moment(store, mongo, sampler.pid)
        await until_scored(store, num_records - concurrency)
        last = await moment(store, mongo, sampler.pid)
        errors = await store.database["turns"].count_documents({"tool_results.is_error": True})
        assert not errors, "the tool refused a call"
        return {"concurrency": concurrency, **costs(first, last)}


def costs(first: Moment, last: Moment) -> dict[str, Any]:
    """Return the costs per turn between two moments."""
    turns = last.turns - first.turns

    def a_turn(before: dict[str, int], after: dict[str, int], digits: int, scale: float) -> Any:
        grown = {name: (after[name] - before.get(name, 0)) * scale / turns for name in after}
        shown = {name: round(value, digits) for name, value in grown.items()}
        return dict(sorted(((n, v) for n, v in shown.items() if v), key=lambda one: -one[1]))

    return {
        "sampler_ms": round(1000 * (last.sampler - first.sampler) / turns, 3),
        "mongod_ms": round(1000 * (last.mongod - first.mongod) / turns, 3),
        "others_ms": round(1000 * (last.others - first.others) / turns, 3),
        "turns_per_second": round(turns / (last.at - first.at), 1),
        "turns": turns,
        "turns_a_record": round(turns / (last.records - first.records), 2),
        "commands": a_turn(first.commands, last.commands, 3, 1),
        "collection_ms": a_turn(first.collections, last.collections, 3, 1e-3),
    }


def measured(*, quick: bool) -> dict[str, Any]:
    """Return the costs with few and with many rollouts, and the worse of each."""
    warm, records = (64, 320) if quick else (160, 1600)
    rows = [asyncio.run(measure(number, warm, records)) for number in CONCURRENCIES]
    worst = {name: max(row[name] for row in rows) for name in ("sampler_ms", "mongod_ms")}
    return {**worst, "concurrencies": rows, "quick": quick}


if __name__ == "__main__":
    flags = parser(__doc__, "turn_cost")
    flags.add_argument("--quick", action="store_true", help="fewer rollouts")
    report(flags, lambda given: measured(quick=given.quick))
