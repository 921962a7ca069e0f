"""Measures what attacks and faults cost in time and memory: the figures of docs/security.md.

    python benchmarks/hardening.py
    python benchmarks/hardening.py --only engine run                 measure these parts again
    python benchmarks/hardening.py --fuzz fuzz.json --chaos a.json b.json

All attacks are made on the product's own code and processes: a served engine, an agent's endpoint in
front of a store, tool servers that flood their client, a private mongod that is killed, and a run whose
processes are killed one after another. Memory is the growth of a process, and a stall the processor
time of one callback of an event loop. `--fuzz` and `--chaos` take the output of `scripts/fuzz --json`
and `scripts/chaos --json`, and measure nothing; figures of several chaos campaigns are added. The file
keeps figures that a call does not measure. What is refused, and how, is asserted by the tests that the
page names.
"""

import asyncio
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
from harness.apart import Meter, PeakMemory, apart
from harness.attacks import files, wall_attacks, wall_rooms
from harness.attacks.hostile_requests import CHAT
from harness.attacks.texts import DEEPSEEK_CALL, READERS, hostile_texts, repeated
from harness.played import MODEL, open_store, rollout_context, served_by
from harness.processes import ROOT, engine_process, listening_process
from harness.results import keep, machine, parser
from harness.scripted_engine import serve_script
from harness.started import Started, metrics, started
from pydantic import SecretStr

from agentrl.config.sections import AgentSection, DataSection, RolloutSection, SamplingSection
from agentrl.datasets.question_files import load_questions
from agentrl.errors import DatasetError, InferenceError, ToolError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.launcher.cluster.recovery import keep_running
from agentrl.renderers.renderer import Renderer
from agentrl.rewards.agent_config import JudgeSettings
from agentrl.rewards.chat import ask_models, open_chat_client
from agentrl.rollout.agent import AgentEndpointServer, AgentSampler
from agentrl.runtime.processes.restarts import Restarts
from agentrl.schema import MCPTask
from agentrl.schema.agent_endpoint import AgentEndpoint
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.tools import ToolsConfig, connect_tools, load_mcp_servers

PATIENCE_SECONDS = 60.0
Figures = dict[str, Any]

# --- texts and files --------------------------------------------------------------------------

SCANNED_CHARS, LONG_CHARS = 16_000, 64_000
SLOWEST, REPEATS = 3, 3
"""Texts per reader whose growth is measured, and repetitions, of which the shortest counts."""
NAMED = {
    "deepseek": ("deepseekv3", DEEPSEEK_CALL + " " * 1_600),
    "boxed": ("boxed", "\\boxed{" * 2_000),
    "mistral": ("mistral", "[TOOL_CALLS]name" + " " * 200_000),
    "judge": ("verdict", "```" + " " * 200_000),
    **{
        name: ("answer" if name == "answer" else "thinking", repeated(mark, 200_000))
        for name, mark in (("think", "<think>"), ("think_end", "</think>"), ("answer", "<answer>"))
    },
}
"""Texts of the earlier measurement, and their readers."""


def texts() -> Figures:
    """Return the milliseconds of the named texts, and how time grows with any text's length."""
    found: Figures = {
        f"{name}_ms": round(1000 * _seconds(*named), 2) for name, named in NAMED.items()
    }
    growths, num_texts = [], 0
    for reader, (_, marks) in READERS.items():
        makers = [make for _, make in hostile_texts(marks)]
        num_texts += len(makers)
        makers.sort(key=lambda make: _seconds(reader, make(SCANNED_CHARS), 1))
        growths += [
            _seconds(reader, make(2 * LONG_CHARS)) / _seconds(reader, make(LONG_CHARS))
            for make in makers[-SLOWEST:]
        ]
    growth = round(max(growths), 2)
    return {**found, "texts": num_texts, "readers": len(READERS), "largest_growth": growth}


def _seconds(reader: str, text: str, repeats: int = REPEATS) -> float:
    read, _ = READERS[reader]
    seconds = []
    for _ in range(repeats):
        begun = time.thread_time()
        read(text)
        seconds.append(time.thread_time() - begun)
    return min(seconds)


def question_files() -> Figures:
    """Return the most seconds and megabytes until a question file without end is refused."""
    with tempfile.TemporaryDirectory() as name:
        makers = (files.endless_line, files.endless_element, files.parquet_bomb)
        paths = [make(Path(name)) for make in (files.pipe, *makers, files.repeated_cells)]
        costs = {path.stem.partition(".")[0]: apart(_load, path) for path in paths}
    return {
        "seconds": max(cost["seconds"] for cost in costs.values()),
        "megabytes": max(cost["megabytes"] for cost in costs.values()),
        "line_seconds": costs["line"]["seconds"],
        "line_megabytes": costs["line"]["megabytes"],
        "files": costs,
    }


async def _load(meter: Meter, path: Path) -> Figures:
    with meter:
        try:
            load_questions(path, DataSection())
        except DatasetError as error:
            return {"refused": str(error)}
    raise AssertionError(f"{path.name} is read")


# --- tool servers -----------------------------------------------------------------------------


def tools() -> Figures:
    """Return the cost of tool servers, aggregators and judges that answer with excessive data."""
    server = Path(__file__).parent / "harness/attacks/flooding_server.py"
    with listening_process((sys.executable, server, "{port}")) as url:
        return {
            "many_tools": apart(_call, f"{url}/many"),
            "description": apart(_call, f"{url}/described"),
            "blocks": apart(_call, f"{url}/calls", "blocks"),
            "packed": apart(_call, f"{url}/calls", "packed"),
            "aggregator": apart(_call, f"{url}/mcpapi", "endless"),
            "judge": apart(_judge, f"{url}/v1"),
        }


async def _call(meter: Meter, url: str, tool: str | None = None) -> Figures:
    """List the tools of a server; if one is named, only its call is measured."""
    config = ToolsConfig(
        servers=load_mcp_servers(url), max_retries=0, call_timeout_seconds=PATIENCE_SECONDS
    )
    async with AsyncExitStack() as stack:
        if tool is None:
            stack.enter_context(meter)
        try:
            box = await stack.enter_async_context(connect_tools(config))
            if tool is None:
                return {"outcome": f"{len(box.specs)} tools are offered"}
            with meter:
                return {"outcome": (await box.call(tool, {})).content[:200]}
        except ToolError as error:
            return {"outcome": str(error)}


async def _judge(meter: Meter, url: str) -> Figures:
    model = {"model": "judge", "base_url": url, "api_key": "none"}
    settings = JudgeSettings.model_validate({"models": [model], "max_retries": 0})
    async with open_chat_client(PATIENCE_SECONDS) as client:
        with meter:
            try:
                _, reply = await ask_models(client, settings, "Is it?", str)
            except InferenceError as error:
                return {"outcome": str(error)}
    return {"outcome": reply[:200]}


# --- an agent's endpoint, and the engine --------------------------------------------------------


def endpoint() -> Figures:
    """Return the cost of a call of 60 MB to an agent's endpoint, in a sampler's process."""
    return {"user_text": apart(_long_call)}


async def _long_call(meter: Meter) -> Figures:
    statuses: list[int] = []

    async def agent(_: MCPTask, at: AgentEndpoint) -> str:
        long = CHAT | {"messages": [{"role": "user", "content": "word " * 12_000_000}]}
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as http:
            with meter:
                for body in (long, CHAT):
                    answer = await http.post(f"{at.base_url}/chat/completions", json=body)
                    statuses.append(answer.status_code)
        return "7"

    renderer = Renderer.load(MODEL)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        mongo = stack.enter_context(EmbeddedMongo(Path(folder) / "mongo"))
        engine = stack.enter_context(serve_script(renderer, lambda _: "hm"))
        store = await stack.enter_async_context(open_store(mongo))
        pool = await stack.enter_async_context(served_by(store, engine.base_url))
        toolbox = await stack.enter_async_context(connect_tools(ToolsConfig(servers={})))
        served = AgentEndpointServer.open(AgentSection(), "m")
        endpoints = await stack.enter_async_context(served)
        await store.tasks.add([MCPTask(id="train/0/q1", query="?", answer="7", scorer="exact")])
        sampling = SamplingSection(max_new_tokens=24, max_prompt_tokens=500)
        context = rollout_context(store, pool, toolbox, sampling, RolloutSection(max_turns=1_000))
        claimed = await store.records.claim(
            "bench", lease_seconds=600, admitted_groups=1000, max_attempts=3
        )
        assert claimed is not None
        record, task = claimed
        assert isinstance(task, MCPTask)
        sampler = AgentSampler(task, record, context, agent=agent, endpoints=endpoints)
        await sampler.run()
        await sampler.finish()
    assert statuses == [400, 200]
    return {}


def engine() -> Figures:
    """Return the cost of large and of half-sent requests to a served engine."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65_536), most))
    with engine_process(MODEL) as url:
        (process,) = [
            one
            for one in psutil.Process().children(recursive=True)
            if "agentrl.plugins.engine" in one.cmdline() and "--port" in one.cmdline()
        ]
        found = asyncio.run(_attack(url, process.pid))
        assert process.is_running()
    return found


async def _attack(url: str, pid: int) -> Figures:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS, trust_env=False) as http:
        await _generate(http)
        return {"large": await _large(http, pid), "half_sent": await _half_sent(http)}


async def _generate(http: httpx.AsyncClient) -> float:
    """Return the seconds of a well-formed request."""
    begun = time.monotonic()
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return time.monotonic() - begun


async def _large(http: httpx.AsyncClient, pid: int) -> Figures:
    """Send 20 MB of text while another client samples."""
    peak, waits = PeakMemory(pid), []
    sending = asyncio.create_task(http.post("/generate", json={"text": "a " * 10_000_000}))
    while not sending.done():
        waits.append(await _generate(http))
    status = (await sending).status_code
    wait = round(max(waits), 3)
    return {"status": status, "megabytes": peak.megabytes(), "neighbour_seconds": wait}


async def _half_sent(http: httpx.AsyncClient) -> Figures:
    """Open thousands of incomplete requests, and wait until the server has closed all of them."""
    begun, number = time.monotonic(), 3_000
    opened = [await asyncio.open_connection("127.0.0.1", http.base_url.port) for _ in range(number)]
    for _, writer in opened:
        writer.write(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n")
    wait = round(await _generate(http), 3)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*(reader.read() for reader, _ in opened))
    seconds = round(time.monotonic() - begun, 1)
    for _, writer in opened:
        writer.close()
    return {"tried": number, "seconds": seconds, "neighbour_seconds": wait}


# --- faults -----------------------------------------------------------------------------------


def mongod() -> Figures:
    """Return the seconds from a kill of the private mongod until it answers its clients again."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedMongo(Path(folder) / "mongo") as mongo:
        return asyncio.run(_kill_mongod(mongo))


async def _kill_mongod(mongo: EmbeddedMongo) -> Figures:
    keeping = asyncio.create_task(keep_running(mongo, Restarts(2, first_delay_seconds=0.01)))
    async with TrajectoryStore.connect(mongo.uri("run")) as store:
        await store.ensure_schema()
        begun = time.monotonic()
        os.kill(mongo.pid, signal.SIGKILL)
        await store.tasks.count()
        seconds = time.monotonic() - begun
    keeping.cancel()
    await asyncio.wait({keeping})
    return {"seconds": round(seconds, 1)}


KEYS = {"AGENTRL_API_KEY": "key-for-data", "AGENTRL_ADMIN_KEY": "key-for-control"}
KILLED = {"trainer": "agentrl train", "keeper": "agentrl serve", "mongod": "mongod --"}
RUN = """agentrl run --run_name hard --config {root}/assets/demo/grpo.yaml --output_dir {folder}/output
    --logs_dir {folder}/logs --mongo_data_dir {folder}/mongo --mongo_port 0 --max_steps 1000
    --groups_per_step 4 --num_generations 4 --eval_strategy no --save_steps 1
    --num_train_epochs 1000"""


def run() -> Figures:
    """Return the seconds until a run trains again after each kill, and until two SIGINTs end it."""
    found: Figures = {}
    os.environ.update(KEYS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        words = RUN.format(root=ROOT, folder=folder).split()
        with started([sys.executable, "-m", *words], folder) as running:
            running.until(lambda: metrics(folder))
            for name, command in KILLED.items():
                killed, begun = running.child(command), time.monotonic()
                killed.kill()
                # The second step consists of rollouts that started after the kill.
                running.until(_more_steps(folder, 2))
                found[f"{name}_seconds"] = round(time.monotonic() - begun, 1)
            found["paused_seconds"] = asyncio.run(_pause(running))
            running.until(_more_steps(folder, 1))
            found["interrupt_seconds"] = _interrupt(running)
    return found


def _more_steps(folder: Path, number: int) -> Callable[[], bool]:
    before = len(metrics(folder))
    return lambda: len(metrics(folder)) >= before + number


async def _pause(running: Started) -> float:
    """Pause the server as an intruder with its key could; return the seconds until it resumes."""
    (server,) = [one for one in running.children() if "agentrl.plugins.engine" in one.cmdline()]
    (listening,) = [one for one in server.net_connections("tcp") if one.status == "LISTEN"]
    data, control = (SecretStr(key) for key in KEYS.values())
    url = f"http://127.0.0.1:{listening.laddr.port}"
    async with SGLangClient(url, api_key=data, admin_key=control) as client:
        await client.pause("in_place")
        begun = time.monotonic()
        while True:
            if not await client.is_paused():
                return round(time.monotonic() - begun, 1)
            await asyncio.sleep(0.1)


def _interrupt(running: Started) -> float:
    children = running.children()
    running.process.send_signal(signal.SIGINT)
    time.sleep(1)  # signals in quick succession would count as one
    begun = time.monotonic()
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGINT)
    running.process.wait(60)
    psutil.wait_procs(children, timeout=60)
    return round(time.monotonic() - begun, 1)


# --- the wall ---------------------------------------------------------------------------------


def wall() -> Figures:
    """Return the ways that leave the wall behind each door, what bombs hold, and what a start costs."""
    doors = {door: wall_rooms.tried(door) for door in wall_rooms.DOORS}
    bombs = {
        "wall of root": wall_rooms.all_bombed(),
        "wall of another user": wall_rooms.all_bombed(wall_rooms.STRANGER),
    }
    kept = [
        f"{room}: {name}" for room, one in bombs.items() for name in one if one[name]["is_kept"]
    ]
    num_bombs = sum(map(len, bombs.values()))
    return {
        "tried": sum(found["tried"] for found in doors.values()) + num_bombs,
        "left": sum(len(found["left"]) for found in doors.values()) + len(kept),
        "read": sum(len(found["read"]) for found in doors.values()),
        "ways": len(wall_attacks.WAYS),
        **wall_rooms.start_times(),
        "doors": doors,
        "bombs": bombs,
    }


# --- campaigns --------------------------------------------------------------------------------


def fuzzed(path: Path) -> Figures:
    """Return the figures of a campaign of `scripts/fuzz`."""
    found: Figures = json.loads(path.read_text(encoding="utf-8"))
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def chaos(paths: list[Path]) -> Figures:
    """Return the figures of campaigns of `scripts/chaos`, added up."""
    campaigns = list(map(fuzzed, paths))
    seeds = [one.pop("seed") for one in campaigns]
    return {"seeds": seeds, **{name: sum(one[name] for one in campaigns) for name in campaigns[0]}}


PARTS: dict[str, Callable[[], Figures]] = {
    "texts": texts,
    "files": question_files,
    "tools": tools,
    "engine": engine,
    "endpoint": endpoint,
    "mongod": mongod,
    "run": run,
    "wall": wall,
}


def main() -> None:
    """Measure and write."""
    flags = parser(__doc__, "hardening")
    flags.add_argument("--only", nargs="*", choices=PARTS, default=[*PARTS], help="these parts")
    flags.add_argument("--fuzz", type=Path, help="what scripts/fuzz --json printed")
    flags.add_argument("--chaos", type=Path, nargs="+", help="what scripts/chaos --json printed")
    given = flags.parse_args()
    if given.fuzz is not None:
        keep(given.out, {"fuzz": fuzzed(given.fuzz)})
    if given.chaos is not None:
        keep(given.out, {"chaos": chaos(given.chaos)})
    if given.fuzz is None and given.chaos is None:
        for name in given.only:
            about = machine()
            keep(given.out, {name: {**PARTS[name](), "machine": about}})


if __name__ == "__main__":
    main()
