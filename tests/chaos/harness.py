"""A whole run under faults of every process, of the network and the disk.

Everything is real but what a model says: one of two engines answers by script, over real HTTP, and
the other computes an untrained model. A killed process is started again, the mongod on the same data.
"""

import asyncio
import functools
import itertools
import logging
import random
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from chaos import sampler, slow_scorer, trainer
from chaos.databases import ReplicaSet, SingleMongod, can_mount, replica_set, single_mongod
from chaos.journal import Journal
from chaos.network import Network, network
from chaos.plan import BAD_CONTROLS, LINKS, PROCESSES, Kind, Strike, plan
from chaos.processes import Member, running
from chaos.spoiling import Facts, damage_newest_checkpoint, exchange, with_little_memory
from chaos.verdict import Verdict, judge
from harness.scripted_engine import serve_script
from support.command_lines import words_of
from support.play import TOOL_SERVER, tool_call
from support.training import write_model

from agentrl.cli.main import main as agentrl
from agentrl.errors import StoreError
from agentrl.plugins.engine.__main__ import main as engine
from agentrl.renderers.renderer import Renderer
from agentrl.runtime.ports import ReservedPort
from agentrl.runtime.processes.child_processes import end_with_parent
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore
from agentrl.trainer.checkpoint import checkpoint_paths

log = logging.getLogger("chaos")
T = TypeVar("T")

RUN = "chaos"
NUM_GENERATIONS = 4
Rollouts = Literal["chains", "tree"]
ROUNDS: Mapping[Rollouts, tuple[int, ...]] = {"chains": (), "tree": (2, 1, 1)}
GROUPS_AT_ONCE, FEED_SECONDS = 12, 0.5
LEASE_SECONDS = 6
MODEL_SECONDS = 0.25
NUM_TOOL_CALLS = 3
MAX_STALENESS = 4
RETAIN_STEPS = 2
STOP_SECONDS = 60.0
"""How long a process may take to end that was asked to."""
PATIENCE_SECONDS = 90.0
REFUSED_STARTS = (
    "StoreUnreachable: connect: ",
    "agentrl serve: connect: ",
    "StoreUnreachable: acquire the trainer's lease: ",
    "StoreUnreachable: read the scorers: ",
    "ToolError: MCP server 'default' at ",
)
"""What a process says that begins while its database or its tools are away; it ends, and whoever
supervises it starts it again."""
DISK_FULL_SECONDS = 1.5
TOOLS_AWAY_SECONDS = 1.0
SAMPLING = {
    "sampler-a": {"scoring": "own", "resumable_tools": "true"},
    "sampler-b": {"scoring": "elsewhere", "resumable_tools": "true"},
    "sampler-c": {"scoring": "own", "resumable_tools": "false"},
    "scorer": {"scoring": "only"},
}


@dataclass(frozen=True)
class RunKind:
    """What kind of run is played."""

    rollouts: Rollouts = "chains"
    is_own_loop: bool = False
    """The trainer's loop is one as users write it."""


@dataclass
class Outcome:
    """What `run_chaos` returns."""

    seed: int
    restarts: dict[str, int]
    """Kills by the kind of process; each was started again."""
    faults: dict[str, int]
    """All faults by kind."""
    not_played: list[str]
    """Kinds that this machine cannot play, with the reason."""
    unexpected_exits: list[str]
    refused_starts: int
    """Processes that began while their database or their tools were away, and were started again."""
    seconds: float
    verdict: Verdict

    @property
    def kills(self) -> int:
        """Faults that ended a process."""
        return sum(self.restarts.values())

    def as_json(self) -> dict[str, Any]:
        """Return everything as one JSON object."""
        own = {name: getattr(self, name) for name in ("kills", "seed", "restarts", "not_played")}
        own |= {"faults": sum(self.faults.values()), "faults_by_kind": self.faults}
        own |= {name: getattr(self, name) for name in ("unexpected_exits", "refused_starts")}
        rest = {"seconds": round(self.seconds, 1)}
        return {**own, "stalls": self.faults.get("stall", 0), **asdict(self.verdict), **rest}


class ToolServer:
    """The tool server, on the same port whenever it is started."""

    def __init__(self, log_file: Path, port: int) -> None:
        self.port = port
        self._command = [sys.executable, str(TOOL_SERVER), str(log_file), str(self.port)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it."""
        self._process = subprocess.Popen(
            self._command,
            stderr=subprocess.DEVNULL,
            preexec_fn=end_with_parent(signal.SIGKILL),
        )

    async def until_listening(self) -> None:
        """Wait until it takes connections."""
        assert self._process is not None
        while True:
            assert self._process.poll() is None, (
                f"the tool server ended; is port {self.port} taken?"
            )
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                writer.close()
                return

    def kill(self) -> None:
        """End it at once."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@dataclass
class Chaos:
    """One run, and the hand that strikes."""

    mongo: SingleMongod | ReplicaSet
    store: TrajectoryStore
    members: dict[str, Member]
    tools: ToolServer
    network: Network
    journal: Journal
    rollouts: Rollouts
    folder: Path
    uri_of: Callable[[str], str]
    """Connection string of another database of the mongod."""
    engine_url: str
    restarts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    num_refused_starts: int = 0
    num_groups: int = 0

    @property
    def output(self) -> Path:
        """Where the trainer writes."""
        return self.folder / "output"

    def tend(self) -> None:
        """Start again what ended by itself; that is not supposed to happen.

        Only a mongod whose disk was full may end some time later.
        """
        if isinstance(self.mongo, SingleMongod) and self.mongo.revive():
            if self.faults["disk"]:
                self.restarts["disk"] += 1
            else:
                self.unexpected.append("mongod ended")
        for member in self.members.values():
            status = member.process.exitcode
            if status is not None:
                said = member.last_line()
                if any(text in said for text in REFUSED_STARTS):
                    self.num_refused_starts += 1
                else:
                    self.unexpected.append(f"{member.name} ended with {status}: {said}")
                self.start(member)

    def start(self, member: Member) -> None:
        """Start a process (again) and note its number."""
        member.start()
        self.journal.write("start", member=member.name, process=member.process.pid)

    async def add_groups(self) -> None:
        """Add questions."""
        numbers = range(self.num_groups, self.num_groups + GROUPS_AT_ONCE)
        await self.store.tasks.add(
            MCPTask(
                id=f"train/0/q{number}",
                order=number,
                num_generations=NUM_GENERATIONS,
                rounds=ROUNDS[self.rollouts],
                query=f"What does lamp {number} cost?",
                answer="7",
                scorer="slow_exact",
            )
            for number in numbers
        )
        self.num_groups += GROUPS_AT_ONCE

    async def carry_out(self, strike: Strike) -> None:
        """Let one fault happen, and note when it began, when it ended, and what came of it."""
        if strike.victim in self.members:
            alone_until = self.members[strike.victim].started + strike.seconds
            await asyncio.sleep(max(0.0, alone_until - time.monotonic()))
        began = time.monotonic()
        handler = getattr(self, f"_strike_{strike.kind}", self._strike_database)
        facts = await handler(strike)
        self.faults[strike.kind] += 1
        noted = {"fault": strike.kind, "victim": strike.victim, "how": strike.how, "began": began}
        self.journal.write("fault", **noted, **(facts or {}), ended=time.monotonic())

    async def _strike_sampler(self, strike: Strike) -> None:
        member = self.members[strike.victim]
        member.kill()
        self.start(member)
        self.restarts[strike.kind] += 1

    _strike_scorer = _strike_trainer = _strike_supervisor = _strike_sampler

    async def _strike_launcher(self, strike: Strike) -> None:
        await self._lose_everything()
        self.restarts[strike.kind] += 1

    async def _strike_stall(self, strike: Strike) -> None:
        self.members[strike.victim].signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE_SECONDS + 1)
        self.members[strike.victim].signal(signal.SIGCONT)

    async def _strike_tools(self, strike: Strike) -> None:
        self.tools.kill()
        await asyncio.sleep(TOOLS_AWAY_SECONDS)
        self.tools.start()
        await self.tools.until_listening()
        self.restarts[strike.kind] += 1

    async def _strike_network(self, strike: Strike) -> None:
        link = self.network.links[strike.victim]
        link.begin("cut" if strike.how == "cut" else "silence")
        await asyncio.sleep(strike.seconds)
        link.end()

    async def _strike_stop(self, strike: Strike) -> Facts:
        """End one process as a scheduler does; its launcher starts it again."""
        member = self.members[strike.victim]
        asked = time.monotonic()
        member.signal(signal.Signals[strike.how])
        await asyncio.to_thread(member.process.join, STOP_SECONDS)
        status = member.process.exitcode
        if status is None:
            member.kill()
        facts = {"status": status, "seconds": time.monotonic() - asked, "said": member.last_line()}
        self.start(member)
        self.restarts[strike.kind] += 1
        return facts

    async def _strike_checkpoint(self, strike: Strike) -> Facts:
        """Damage the newest checkpoint while the trainer is down."""
        trainer = self.members["trainer"]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            await self.patiently(self.store.runs.get)
            while len(checkpoint_paths(self.output)) < 2 and time.monotonic() < deadline:
                self.tend()
                await asyncio.sleep(0.2)
            trainer.kill()
            facts = damage_newest_checkpoint(self.output, strike.how)
            self.start(trainer)
            self.restarts[strike.kind] += 1
            if facts is not None:
                return {**facts, "started": trainer.started}
            assert time.monotonic() < deadline, "the trainer saved no two checkpoints"

    async def _strike_control(self, strike: Strike) -> None:
        """Write a value into the run's document that nobody can follow, and the former one back."""
        field = f"control.{strike.how}"
        runs = self.store.database["runs"]
        before = ((await runs.find_one({})) or {}).get("control", {})
        await runs.update_one({}, {"$set": {field: BAD_CONTROLS[strike.how]}})
        await asyncio.sleep(strike.seconds)
        await runs.update_one({}, {"$set": {field: before.get(strike.how)}})

    async def _strike_memory(self, strike: Strike) -> Facts:
        engine = self.members["engine"]
        facts = await with_little_memory(engine, self.engine_url, strike.seconds)
        if facts["has_died"]:
            self.restarts[strike.kind] += 1
        return facts

    async def _strike_export(self, strike: Strike) -> Facts:
        return await self.patiently(lambda: exchange(self.store, self.folder, self.uri_of))

    async def _strike_database(self, strike: Strike) -> None:
        if isinstance(self.mongo, ReplicaSet):
            if strike.kind == "step_down":
                self.mongo.step_down()
            else:
                self.mongo.lose(primary=strike.kind == "primary")
                self.restarts[strike.kind] += 1
        elif strike.kind == "freeze":
            self.mongo.signal(signal.SIGSTOP)
            await asyncio.sleep(LEASE_SECONDS + 1)
            self.mongo.signal(signal.SIGCONT)
        elif strike.kind == "disk":
            self.mongo.fill_disk()
            await asyncio.sleep(DISK_FULL_SECONDS)
            self.mongo.free_disk()
            await asyncio.sleep(DISK_FULL_SECONDS)
        else:
            self.mongo.kill()
            self.restarts[strike.kind] += 1

    async def _lose_everything(self) -> None:
        """End all at once, as the kernel does with the children of a killed launcher; start again."""
        assert isinstance(self.mongo, SingleMongod)
        for member in self.members.values():
            member.kill()
        self.tools.kill()
        self.mongo.kill()
        self.tools.start()
        await self.tools.until_listening()  # samplers refuse to begin without their tools
        for member in self.members.values():
            self.start(member)

    async def rage(self, strikes: Sequence[Strike]) -> None:
        """Strike as planned, while questions are added: a trainer without any is done."""
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._feed(ended))
            for number, strike in enumerate(strikes, 1):
                await asyncio.sleep(strike.pause_seconds)
                log.info("%d of %d: %s %s", number, len(strikes), strike.kind, strike.victim)
                await self.carry_out(strike)
                self.tend()
                await self.patiently(self.store.runs.get)
            ended.set()

    async def _feed(self, ended: asyncio.Event) -> None:
        """Keep more groups in the run than samplers are admitted to.

        What was begun is added whole, as whoever adds questions to a run does again what failed.
        """
        is_adding = False
        while is_adding or not ended.is_set():
            with suppress(StoreError):  # the database is away, for the trainer as well
                run = await self.store.runs.get()
                if run is None or self.num_groups - run.admitted_groups < GROUPS_AT_ONCE:
                    is_adding = True
                    await self.add_groups()
                is_adding = False
            await asyncio.sleep(FEED_SECONDS)

    async def patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something with the store, also while its mongod comes back."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return await work()
            except StoreError:
                if time.monotonic() > deadline:
                    raise
                self.tend()
                await asyncio.sleep(0.2)

    async def settle(self, seconds: float) -> None:
        """Wait until the trainer has consumed everything and declares the run completed.

        Raises:
            TimeoutError: it did not.
        """
        deadline = time.monotonic() + seconds
        while True:
            run = await self.patiently(self.store.runs.get)
            if run is not None and run.status == "completed":
                return
            if time.monotonic() > deadline:
                progress = await self.store.reports.progress()
                raise TimeoutError(f"the run did not end in {seconds:g} s: {progress}")
            self.tend()
            await asyncio.sleep(0.2)


async def run_chaos(
    folder: Path,
    *,
    faults: int,
    seed: int,
    weights: Mapping[Kind, int] = PROCESSES,
    pause_seconds: tuple[float, float] = (0.3, 2.5),
    settle_seconds: float = 300.0,
    kind: RunKind = RunKind(),
) -> Outcome:
    """Play a run under faults and judge what is left of it.

    Call it from the main thread: the mongod ends with the thread that started it.

    Args:
        folder: where data, logs and journals go.
        faults: how many.
        seed: decides what happens when.
        weights: kinds of faults; those of `ELECTIONS` are played on a replica set of three.
        pause_seconds: bounds of the pauses between faults.
        settle_seconds: how long the run may take to end after the last fault.
        kind: what is sampled, and who trains.

    Raises:
        TimeoutError: the run did not come to its end afterwards.
    """
    started = time.monotonic()
    async with _open(folder, kind, is_replicated="primary" in weights) as chaos:
        skipped = _not_playable(chaos.mongo) if "disk" in weights else {}
        playable = {one: weight for one, weight in weights.items() if one not in skipped}
        await chaos.rage(plan(faults, seed, pause_seconds, playable))
        await chaos.settle(settle_seconds)
        for member in chaos.members.values():
            member.kill()
        verdict = await judge(
            chaos.store, folder, max_staleness=MAX_STALENESS, retain_steps=RETAIN_STEPS
        )
        return Outcome(
            seed=seed,
            restarts=dict(chaos.restarts),
            faults=dict(chaos.faults),
            not_played=[f"{kind}: {why}" for kind, why in skipped.items()],
            unexpected_exits=chaos.unexpected,
            refused_starts=chaos.num_refused_starts,
            seconds=time.monotonic() - started,
            verdict=verdict,
        )


def _not_playable(mongo: SingleMongod | ReplicaSet) -> dict[Kind, str]:
    """Return the kinds that need what this machine lacks, with what that is."""
    skipped: dict[Kind, str] = {}
    if not can_mount():
        skipped["disk"] = "only root may mount a small file system"
    return skipped


@asynccontextmanager
async def _open(folder: Path, kind: RunKind, *, is_replicated: bool) -> AsyncIterator[Chaos]:
    with ExitStack() as stack:
        links = stack.enter_context(network())
        # While one of the two is down, no other process of the machine may answer in its place: a
        # foreign tool server's tools make other prompts.
        mongo_port, tools_port, engine_port = (
            stack.enter_context(ReservedPort("127.0.0.1")).port for _ in range(3)
        )
        mongo: SingleMongod | ReplicaSet
        if is_replicated:
            mongo = stack.enter_context(replica_set(folder))
            uri_of = mongo.uri
            uris = dict.fromkeys(("", *_MEMBER_NAMES), mongo.uri(RUN))
        else:
            mongo = stack.enter_context(single_mongod(folder, mongo_port))
            uri_of = functools.partial(mongo.uri, port=mongo.port)
            uris = {
                name: mongo.uri(RUN, links.link(f"{name}>mongod", mongo.port).port)
                for name in _MEMBER_NAMES
            } | {"": mongo.uri(RUN, mongo.port)}
        model = write_model(folder / "model", max_position_embeddings=8192)
        scripted = stack.enter_context(
            serve_script(Renderer.load(model), _script(), delay_seconds=MODEL_SECONDS)
        )
        scripted.requests = deque(maxlen=1)  # a long run would fill the memory
        tools = ToolServer(folder / "tools.log", tools_port)
        tools.start()
        stack.callback(tools.kill)
        await tools.until_listening()
        engines = (scripted.base_url, engine_port)
        members = _members(folder, model, uris, engines, tools, links, kind)
        assert {*LINKS} <= links.links.keys() or is_replicated
        async with TrajectoryStore.connect(uris[""]) as store:
            await store.ensure_schema()
            journal = Journal(folder / "faults.jsonl")
            by_name = {member.name: member for member in members}
            engine_url = f"http://127.0.0.1:{engine_port}"
            chaos = Chaos(
                mongo,
                store,
                by_name,
                tools,
                links,
                journal,
                kind.rollouts,
                folder,
                uri_of,
                engine_url,
            )
            await chaos.add_groups()
            stack.enter_context(running(members))
            for member in members:
                journal.write("start", member=member.name, process=member.process.pid)
            yield chaos


_MEMBER_NAMES = (*SAMPLING, "trainer", "supervisor")


def _members(
    folder: Path,
    model: Path,
    uris: Mapping[str, str],
    engines: tuple[str, int],
    tools: ToolServer,
    links: Network,
    kind: RunKind,
) -> list[Member]:
    """Make the run's processes; of the two engines, one speaks by script and one is real."""
    common = {"run_name": RUN, "model_name_or_path": model, "logs_dir": folder}
    sampling: dict[str, Any] = {
        "scorer_module": slow_scorer.__file__,
        "max_new_tokens": 200,
        "lease_seconds": LEASE_SECONDS,
        "max_attempts": 100,
        "max_concurrent_samples_per_process": 4,
    }
    if kind.rollouts == "tree":
        sampling |= {"rollouts": "tree", "branch_depth": NUM_TOOL_CALLS}
    training = {
        "output_dir": folder / "output",
        "groups_per_step": 2,
        "save_steps": 3,
        "max_steps": 1_000_000,
        "max_staleness": MAX_STALENESS,
        "retain_steps": RETAIN_STEPS,
        "trainer_threads": 1,
        "trainer_lease_seconds": LEASE_SECONDS,
        "torch_dtype": "float32",
    }

    def member(name: str, main: Any, *words: str, **flags: Any) -> Member:
        flags = {**common, "db_connection_string": uris[name], **flags}
        argv = [*words, *words_of(flags, folder)]
        return Member(name, main, argv, folder / f"{name}.log")

    journal = str(folder / "samplers.jsonl")
    scripted, engine_port = engines
    link = links.link("everyone>engine", int(scripted.rpartition(":")[2]))
    servers = f"http://127.0.0.1:{link.port},http://127.0.0.1:{engine_port}"
    words = ["--model-path", str(model), "--port", str(engine_port), "--num-threads", "1"]
    found = [
        Member("engine", engine, words, folder / "engine.log"),
        member("supervisor", agentrl, "serve", inference_urls=servers),
    ]
    for name, flags in SAMPLING.items():
        port = links.link(f"{name}>tools", tools.port).port
        own = {**sampling, "mcp_manager_url": f"http://127.0.0.1:{port}/mcp", **flags}
        found.append(member(name, sampler.main, journal, **own))
    train = trainer.main_of_own_loop if kind.is_own_loop else trainer.main
    return [*found, member("trainer", train, str(folder / "trainer.jsonl"), **training)]


def _script() -> Callable[[str], str]:
    """Some tool calls and an answer, right every other time."""
    asked = itertools.count()

    def reply(prompt: str) -> str:
        if prompt.count("<tool_response>") < NUM_TOOL_CALLS:
            return tool_call("look", key=random.choice(["lamp", "rug"]))
        return f"<answer>{7 + next(asked) % 2}</answer>"

    return reply
