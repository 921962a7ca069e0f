"""A whole run under kill -9: mongod, samplers, a scorer, a server supervisor and the trainer.

Everything is real but the model: a scripted engine answers over real HTTP. A killed process is
started again, the mongod on the same data.
"""

import asyncio
import itertools
import json
import logging
import os
import random
import signal
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from chaos import sampler, slow_scorer, trainer
from chaos.plan import Strike, plan
from chaos.processes import Member, running
from chaos.verdict import Verdict, judge
from harness.scripted_engine import ScriptedEngine, serve_script
from support.play import run_tool_server, tool_call
from support.training import write_model

from agentrl.cli.main import main as agentrl
from agentrl.errors import StoreError
from agentrl.renderers.renderer import Renderer
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

log = logging.getLogger("chaos")
T = TypeVar("T")

RUN = "chaos"
NUM_GENERATIONS = 4
GROUPS_AT_ONCE = 4
LEASE_SECONDS = 2
MODEL_SECONDS = 0.25
NUM_TOOL_CALLS = 3
MONGO_PORT = 27500
"""Outside the range from which the kernel takes ports: it must be free again after every kill."""
SAMPLING = {
    "sampler-a": {"scoring": "own", "resumable_tools": "true"},
    "sampler-b": {"scoring": "elsewhere", "resumable_tools": "true"},
    "sampler-c": {"scoring": "own", "resumable_tools": "false"},
    "scorer": {"scoring": "only"},
}


@dataclass
class Outcome:
    """What `run_chaos` returns."""

    seed: int
    restarts: dict[str, int]
    """Kills by the kind of process; each was started again."""
    stalls: int
    unexpected_exits: list[str]
    seconds: float
    verdict: Verdict

    @property
    def kills(self) -> int:
        """All of them."""
        return sum(self.restarts.values())

    def as_json(self) -> str:
        """Return everything as one JSON object."""
        own = {name: getattr(self, name) for name in ("kills", "seed", "restarts", "stalls")}
        rest = {"unexpected_exits": self.unexpected_exits, "seconds": round(self.seconds, 1)}
        return json.dumps({**own, **asdict(self.verdict), **rest})


@dataclass
class Chaos:
    """One run, and the hand that strikes."""

    mongo: EmbeddedMongo
    store: TrajectoryStore
    members: dict[str, Member]
    restarts: Counter[str] = field(default_factory=Counter)
    stalls: int = 0
    unexpected: list[str] = field(default_factory=list)
    num_groups: int = 0

    def tend(self) -> None:
        """Start again what ended by itself; that is not supposed to happen."""
        for member in self.members.values():
            status = member.process.exitcode
            if status is not None:
                self.unexpected.append(f"{member.name} ended with {status}: {member.last_line()}")
                member.start()

    async def feed(self) -> None:
        """Keep more groups in the run than samplers are admitted to."""
        run = await self.store.runs.get()
        if run is None or self.num_groups - run.admitted_groups < GROUPS_AT_ONCE:
            await self.add_groups()

    async def add_groups(self) -> None:
        """Add questions."""
        numbers = range(self.num_groups, self.num_groups + GROUPS_AT_ONCE)
        await self.store.tasks.add(
            MCPTask(
                id=f"train/0/q{number}",
                order=number,
                num_generations=NUM_GENERATIONS,
                query=f"What does lamp {number} cost?",
                answer="7",
                scorer="slow_exact",
            )
            for number in numbers
        )
        self.num_groups += GROUPS_AT_ONCE

    async def carry_out(self, strike: Strike) -> None:
        """Kill one process at once and start it again, or stall it."""
        if strike.how == "stall":
            self.members[strike.victim].signal(signal.SIGSTOP)
            await asyncio.sleep(LEASE_SECONDS + 1)
            self.members[strike.victim].signal(signal.SIGCONT)
            self.stalls += 1
            return
        if strike.victim == "mongod":
            os.kill(self.mongo.pid, signal.SIGKILL)
            self.mongo.stop()
            self.mongo.start()
        else:
            member = self.members[strike.victim]
            alone_until = member.started + strike.up_seconds
            await asyncio.sleep(max(0.0, alone_until - time.monotonic()))
            member.kill()
            member.start()
        self.restarts[strike.kind] += 1

    async def rage(self, strikes: Sequence[Strike]) -> None:
        """Strike as planned."""
        for number, strike in enumerate(strikes, 1):
            await asyncio.sleep(strike.pause_seconds)
            await self.carry_out(strike)
            self.tend()
            await patiently(self.feed)
            log.info("%d of %d: %s %s", number, len(strikes), strike.how, strike.victim)

    async def settle(self, seconds: float) -> None:
        """Wait until the trainer has consumed everything and declares the run completed.

        Raises:
            TimeoutError: it did not.
        """
        deadline = time.monotonic() + seconds
        while True:
            run = await patiently(self.store.runs.get)
            if run is not None and run.status == "completed":
                return
            if time.monotonic() > deadline:
                progress = await self.store.reports.progress()
                raise TimeoutError(f"the run did not end in {seconds:g} s: {progress}")
            self.tend()
            await asyncio.sleep(0.2)


async def patiently(work: Callable[[], Awaitable[T]]) -> T:
    """Do something with the store, also while its mongod comes back."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return await work()
        except StoreError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


async def run_chaos(
    folder: Path,
    *,
    kills: int,
    seed: int,
    pause_seconds: tuple[float, float] = (0.3, 2.5),
    settle_seconds: float = 180.0,
) -> Outcome:
    """Play a run under `kills` kills and judge what is left of it.

    Call it from the main thread: the mongod ends with the thread that started it.

    Raises:
        TimeoutError: the run did not come to its end afterwards.
    """
    started = time.monotonic()
    async with _open(folder) as chaos:
        await chaos.rage(plan(kills, seed, pause_seconds))
        await chaos.settle(settle_seconds)
        for member in chaos.members.values():
            member.kill()
        verdict = await judge(chaos.store, folder / "samplers.jsonl", folder / "trainer.jsonl")
        return Outcome(
            seed=seed,
            restarts=dict(chaos.restarts),
            stalls=chaos.stalls,
            unexpected_exits=chaos.unexpected,
            seconds=time.monotonic() - started,
            verdict=verdict,
        )


@asynccontextmanager
async def _open(folder: Path) -> AsyncIterator[Chaos]:
    with ExitStack() as stack:
        mongo = stack.enter_context(EmbeddedMongo(folder / "mongo", MONGO_PORT))
        model = write_model(folder / "model", max_position_embeddings=8192)
        engine = stack.enter_context(
            serve_script(Renderer.load(model), _script(), delay_seconds=MODEL_SECONDS)
        )
        engine.requests = deque(maxlen=1)  # a long run would fill the memory
        tools = stack.enter_context(run_tool_server(folder / "tools.log"))
        members = _members(folder, model, mongo.uri(RUN), engine, tools)
        async with TrajectoryStore.connect(mongo.uri(RUN)) as store:
            await store.ensure_schema()
            chaos = Chaos(mongo, store, {member.name: member for member in members})
            await chaos.add_groups()
            stack.enter_context(running(members))
            yield chaos


def _members(
    folder: Path, model: Path, uri: str, engine: ScriptedEngine, tools: str
) -> list[Member]:
    common = {
        "run_name": RUN,
        "db_connection_string": uri,
        "model_name_or_path": model,
        "logs_dir": folder,
    }
    sampling = {
        "mcp_manager_url": tools,
        "scorer_module": slow_scorer.__file__,
        "max_new_tokens": 200,
        "lease_seconds": LEASE_SECONDS,
        "max_attempts": 100,
        "max_concurrent_samples_per_process": 4,
    }
    training = {
        "output_dir": folder / "output",
        "groups_per_step": 2,
        "save_steps": 3,
        "max_steps": 1_000_000,
        "max_staleness": 4,
        "trainer_threads": 1,
        "trainer_lease_seconds": LEASE_SECONDS,
        "torch_dtype": "float32",
    }

    def member(name: str, main: Any, *words: str, **flags: Any) -> Member:
        argv = [*words, *(f"--{flag}={value}" for flag, value in {**common, **flags}.items())]
        return Member(name, main, argv, folder / f"{name}.log")

    journal = str(folder / "samplers.jsonl")
    return [
        member("supervisor", agentrl, "serve", inference_urls=engine.base_url),
        *(
            member(name, sampler.main, journal, **{**sampling, **flags})
            for name, flags in SAMPLING.items()
        ),
        member("trainer", trainer.main, str(folder / "trainer.jsonl"), **training),
    ]


def _script() -> Callable[[str], str]:
    """Some tool calls and an answer, right every other time."""
    asked = itertools.count()

    def reply(prompt: str) -> str:
        if prompt.count("<tool_response>") < NUM_TOOL_CALLS:
            return tool_call("look", key=random.choice(["lamp", "rug"]))
        return f"<answer>{7 + next(asked) % 2}</answer>"

    return reply
