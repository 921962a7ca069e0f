"""A whole run under kill -9: mongod, samplers, a scorer, a server keeper and the trainer.

Everything is real but the model: a scripted engine answers at once, over real HTTP. Kills are drawn
from a seed; a killed process is started again, the mongod on the same data.
"""

import asyncio
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos.verdict import Verdict, judge
from support.play import run_tool_server, tool_call
from support.scripted_engine import ScriptedEngine, serve_script
from support.training import write_model

from agentrl.errors import StoreError
from agentrl.renderers.renderer import Renderer
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore
from agentrl.store.embedded import EmbeddedMongo

log = logging.getLogger("chaos")

HERE = Path(__file__).parent
RUN = "chaos"
NUM_GENERATIONS = 4
GROUPS_AT_ONCE = 10
LEASE_SECONDS = 3
MONGO_PORT = 27500
"""Outside the range from which the kernel takes ports: it must be free again after every kill."""
KINDS = ("sampler", "scorer", "trainer", "mongod")
WEIGHTS = (45, 20, 15, 20)
TRAINER_UP_SECONDS = (3.0, 12.0)
"""The trainer is left alone for so long after its start, or it would never get through a step."""
SAMPLER_FLAGS = {
    "sampler-a": {"scoring": "own", "resumable_tools": "true"},
    "sampler-b": {"scoring": "elsewhere", "resumable_tools": "true"},
    "sampler-c": {"scoring": "own", "resumable_tools": "false"},
    "scorer": {"scoring": "only"},
}


@dataclass
class Child:
    """A process that is started again whenever it ends."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=_environment()
            )
        self.started = time.monotonic()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@dataclass
class Outcome:
    """What `run_chaos` returns."""

    seed: int
    kills: int
    killed: dict[str, int]
    stalls: int
    unexpected_exits: list[str]
    seconds: float
    verdict: Verdict

    def as_json(self) -> str:
        """Return everything as one JSON object."""
        figures = asdict(self.verdict)
        own = {name: getattr(self, name) for name in ("kills", "seed", "killed", "stalls")}
        rest = {"unexpected_exits": self.unexpected_exits, "seconds": round(self.seconds, 1)}
        return json.dumps({**own, **figures, **rest})


@dataclass
class Chaos:
    """One run, and the hand that kills."""

    folder: Path
    mongo: EmbeddedMongo
    store: TrajectoryStore
    children: dict[str, Child]
    random: random.Random
    pause_seconds: tuple[float, float]
    killed: Counter[str] = field(default_factory=Counter)
    stalls: int = 0
    unexpected: list[str] = field(default_factory=list)
    num_groups: int = 0

    def tend(self) -> None:
        """Start again what ended by itself; that is not supposed to happen."""
        for child in self.children.values():
            assert child.process is not None
            status = child.process.poll()
            if status is not None:
                tail = child.log.read_text(errors="replace").strip().splitlines()[-1:]
                self.unexpected.append(f"{child.name} ended with {status}: {' '.join(tail)}")
                child.start()

    async def feed(self) -> None:
        """Keep more groups in the run than samplers are admitted to."""
        run = await self.store.get_run()
        if run is None or self.num_groups - run.admitted_groups < GROUPS_AT_ONCE:
            await self.add_groups()

    async def add_groups(self) -> None:
        numbers = range(self.num_groups, self.num_groups + GROUPS_AT_ONCE)
        await self.store.add_tasks(
            MCPTask(
                id=f"train/0/q{number}",
                order=number,
                num_generations=NUM_GENERATIONS,
                query=f"What does lamp {number} cost?",
                answer="7",
                scorer="exact",
            )
            for number in numbers
        )
        self.num_groups += GROUPS_AT_ONCE

    def strike(self, kind: str) -> None:
        """Kill one process of this kind at once, and start it again."""
        if kind == "mongod":
            os.kill(self.mongo.pid, signal.SIGKILL)
            self.mongo.stop()
            self.mongo.start()
        else:
            name = kind
            if kind == "sampler":
                name = self.random.choice([n for n in self.children if n.startswith("sampler")])
            self.children[name].kill()
            self.children[name].start()
        self.killed[kind] += 1

    async def stall(self) -> None:
        """Hold a sampler until its leases are gone; it wakes up as a stale holder."""
        victim = self.random.choice([n for n in self.children if n.startswith("sampler")])
        process = self.children[victim].process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE_SECONDS + 1)
        process.send_signal(signal.SIGCONT)
        self.stalls += 1

    def plan(self, kills: int) -> Iterator[str]:
        """Yield the kinds to kill: each once in the beginning, then by weight."""
        first = list(KINDS)
        self.random.shuffle(first)
        for number in range(kills):
            if number < len(first):
                yield first[number]
            else:
                yield self.random.choices(KINDS, WEIGHTS)[0]

    async def rage(self, kills: int, stall_every: int) -> None:
        """Kill `kills` times."""
        for number, kind in enumerate(self.plan(kills), 1):
            await asyncio.sleep(self.random.uniform(*self.pause_seconds))
            if kind == "trainer":
                left_alone = self.random.uniform(*TRAINER_UP_SECONDS)
                while time.monotonic() - self.children["trainer"].started < left_alone:
                    await asyncio.sleep(0.1)
            self.strike(kind)
            if stall_every and number % stall_every == 0:
                await self.stall()
            self.tend()
            await self.patiently(self.feed)
            log.info("%d of %d: killed %s", number, kills, kind)

    async def patiently(self, work: Any) -> Any:
        """Do something with the store, also while its mongod comes back."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return await work()
            except StoreError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.2)

    async def settle(self, seconds: float) -> None:
        """Wait until the trainer has consumed everything and declares the run completed."""
        deadline = time.monotonic() + seconds
        while True:
            run = await self.patiently(self.store.get_run)
            if run is not None and run.status == "completed":
                return
            if time.monotonic() > deadline:
                progress = await self.store.progress()
                raise TimeoutError(f"the run did not end in {seconds:g} s: {progress}")
            self.tend()
            await asyncio.sleep(0.2)


async def run_chaos(
    folder: Path,
    *,
    kills: int,
    seed: int,
    pause_seconds: tuple[float, float] = (0.3, 2.5),
    stall_every: int = 10,
    settle_seconds: float = 300.0,
) -> Outcome:
    """Play a run under `kills` kills and judge what is left of it.

    Call it from the main thread: the mongod ends with the thread that started it.

    Raises:
        TimeoutError: the run did not come to its end afterwards.
    """
    started = time.monotonic()
    async with _open(folder, seed, pause_seconds) as chaos:
        await chaos.rage(kills, stall_every)
        await chaos.settle(settle_seconds)
        for child in chaos.children.values():
            child.kill()
        verdict = await judge(chaos.store, folder / "samplers.jsonl", folder / "trainer.jsonl")
        return Outcome(
            seed=seed,
            kills=chaos.killed.total(),
            killed=dict(chaos.killed),
            stalls=chaos.stalls,
            unexpected_exits=chaos.unexpected,
            seconds=time.monotonic() - started,
            verdict=verdict,
        )


@asynccontextmanager
async def _open(
    folder: Path, seed: int, pause_seconds: tuple[float, float]
) -> AsyncIterator[Chaos]:
    with ExitStack() as stack:
        mongo = stack.enter_context(EmbeddedMongo(folder / "mongo", MONGO_PORT))
        model = write_model(folder / "model", max_position_embeddings=8192)
        engine = stack.enter_context(
            serve_script(Renderer.load(model), _script(), delay_seconds=0.05)
        )
        engine.requests = deque(maxlen=1)  # a long run would fill the memory
        tools = stack.enter_context(run_tool_server(folder / "tools.log"))
        uri = mongo.uri(RUN)
        children = _children(folder, model, uri, engine, tools)
        async with TrajectoryStore.connect(uri) as store:
            await store.ensure_schema()
            chaos = Chaos(folder, mongo, store, children, random.Random(seed), pause_seconds)
            await chaos.add_groups()
            stack.enter_context(_running(children))
            yield chaos


@contextmanager
def _running(children: dict[str, Child]) -> Iterator[None]:
    try:
        for child in children.values():
            child.start()
        yield
    finally:
        for child in children.values():
            if child.process is not None and child.process.poll() is None:
                child.kill()


def _children(
    folder: Path, model: Path, uri: str, engine: ScriptedEngine, tools: str
) -> dict[str, Child]:
    common = {
        "run_name": RUN,
        "db_connection_string": uri,
        "model_name_or_path": model,
        "logs_dir": folder,
    }
    sampling = {
        "mcp_manager_url": tools,
        "max_new_tokens": 200,
        "lease_seconds": LEASE_SECONDS,
        "max_attempts": 100,
        "max_concurrent_samples_per_process": 8,
    }
    training = {
        "output_dir": folder / "output",
        "groups_per_step": 2,
        "save_steps": 3,
        "max_steps": 1_000_000,
        "max_staleness": 10,
        "trainer_threads": 1,
        "trainer_lease_seconds": LEASE_SECONDS,
        "torch_dtype": "float32",
    }
    python, samplers = sys.executable, str(folder / "samplers.jsonl")
    commands = {
        "keeper": [
            *(python, "-m", "agentrl", "serve"),
            *_flags({**common, "inference_urls": engine.base_url}),
        ],
        **{
            name: [
                *(python, str(HERE / "sampler.py"), samplers),
                *_flags({**common, **sampling, **flags}),
            ]
            for name, flags in SAMPLER_FLAGS.items()
        },
        "trainer": [
            *(python, str(HERE / "trainer.py"), str(folder / "trainer.jsonl")),
            *_flags({**common, **training}),
        ],
    }
    return {
        name: Child(name, command, folder / f"{name}.log") for name, command in commands.items()
    }


def _flags(values: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def _environment() -> dict[str, str]:
    tests = str(HERE.parent)
    paths = [tests, str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _script() -> Any:
    """Two tool calls and an answer, right every other time."""
    asked = itertools.count()

    def reply(prompt: str) -> str:
        if prompt.count("<tool_response>") < 2:
            return tool_call("look", key=random.choice(["lamp", "rug"]))
        return f"<answer>{7 + next(asked) % 2}</answer>"

    return reply
