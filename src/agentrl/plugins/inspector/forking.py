"""Forks in the inspector: existing forks of a question as JSON values, and new forks.

A new fork is a process of `agentrl fork`, as on the command line: models, tools and model output
stay out of the process that serves the pages.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from agentrl.errors import ConfigError
from agentrl.plugins.inspector.run_sources import RunSources
from agentrl.runtime.installation import typed_command
from agentrl.runtime.printable import one_line
from agentrl.schema import Fork, Record
from agentrl.schema.base import Value
from agentrl.schema.fork import check_fork_turn, shown_before
from agentrl.store import TrajectoryStore

MAX_RUNNING = 2
_ERROR_PREFIX = "agentrl fork: "
_NEWEST_FORKS = 50


class AskedFork(Value):
    """The fork that a page requests."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    record: str
    turn: int = Field(ge=0)
    version: int | None = Field(default=None, ge=0)
    tries: int = Field(default=1, ge=1, le=32)
    temperature: float | None = Field(default=None, ge=0)
    messages: list[dict[str, Any]] | None = None


async def fork_of(store: TrajectoryStore, record_id: str) -> dict[str, Any] | None:
    """Return the branch point of a fork's rollout; None for a rollout of the run."""
    fork = await store.forks.of_record(record_id)
    return None if fork is None else _fork_answer(fork)


async def forks_of(
    store: TrajectoryStore, task_id: str, record_id: str | None = None
) -> list[dict[str, Any]]:
    """Return the forks of a question's rollouts, or of one of them, each with its own rollouts."""
    forks = await store.forks.of_task(task_id)
    return await _with_tries(store, [one for one in forks if record_id in (None, one.record_id)])


async def newest_forks(store: TrajectoryStore) -> list[dict[str, Any]]:
    """Return the newest forks of a run, each with its own rollouts."""
    return await _with_tries(store, await store.forks.newest(_NEWEST_FORKS))


async def _with_tries(store: TrajectoryStore, forks: Sequence[Fork]) -> list[dict[str, Any]]:
    now = store.clock.now()
    return [
        {
            **_fork_answer(one),
            "tries": [
                _rollout_answer(record, now)
                for record in await store.forked.records.of_task(one.id)
            ],
        }
        for one in forks
    ]


def _fork_answer(fork: Fork) -> dict[str, Any]:
    return {
        **fork.model_dump(mode="json", exclude={"messages"}),
        "is_edited": fork.messages is not None,
    }


def _rollout_answer(record: Record, now: datetime) -> dict[str, Any]:
    is_lost = record.status == "running" and record.lease and record.lease.expires_at < now
    return {
        "record_id": record.id,
        "traj_id": record.traj_id,
        "status": "failed" if is_lost else record.status,
        "score": None if record.score is None else record.score.value,
        "outcome": record.outcome,
        "answer": None if record.final_answer is None else record.final_answer[:200],
        "error": None if record.error is None else record.error[:400],
        "num_turns": len(record.turns),
        "num_output_tokens": record.num_output_tokens,
    }


async def shown(store: TrajectoryStore, record_id: str, turn: int) -> dict[str, Any]:
    """Return the complete messages of a turn's prompt, for editing."""
    turns = await store.holding(record_id).turns.of_record(record_id)
    check_fork_turn(turns, turn)
    return {"messages": shown_before(turns, turn)}


class ForkStarter:
    """Starts processes of `agentrl fork`; `close` stops running ones."""

    def __init__(self, sources: RunSources) -> None:
        """Store the location of the runs, whose stores can write."""
        self._sources = sources
        self._running: dict[asyncio.subprocess.Process, asyncio.Task[None]] = {}

    async def start(self, store: TrajectoryStore, request: AskedFork) -> dict[str, Any]:
        """Start a fork in the background, and return its id and the ids of its records."""
        turns = await store.holding(request.record).turns.of_record(request.record)
        check_fork_turn(turns, request.turn)
        run = await store.runs.get()
        if run is not None and run.is_imported:
            raise ConfigError(
                f"run {run.name!r} was imported, and pages start nothing for imported runs; type: "
                + _typed(request, run.name)
            )
        config_path = self._sources.config_path(store.database_name)
        if not await asyncio.to_thread(config_path.is_file):
            raise ConfigError(
                f"the run's configuration is not in {config_path}; start `agentrl ui` with the "
                f"run's --config, or type: {_typed(request, store.database_name)}"
            )
        if len(self._running) >= MAX_RUNNING:
            raise ConfigError(
                f"{MAX_RUNNING} forks are already running; wait until one has finished"
            )
        with _edit_file(request.messages) as edit:
            process = await asyncio.create_subprocess_exec(
                *_command(request, config_path, edit),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._sources.environment(),
            )
            error_line = asyncio.create_task(_last_line(process))
            self._running[process] = asyncio.create_task(
                self._until_ended(store.database_name, process, error_line)
            )
            assert process.stdout is not None
            first_line = await process.stdout.readline()
        if first_line:
            found: dict[str, Any] = json.loads(first_line)
            return found
        message = (await error_line).removeprefix(_ERROR_PREFIX)
        raise ConfigError(message or "`agentrl fork` failed without a message")

    async def _until_ended(
        self, run: str, process: asyncio.subprocess.Process, error_line: asyncio.Task[str]
    ) -> None:
        # Keeps the store in use while the fork runs; an idle mongod would be stopped.
        async with self._sources.opened(run):
            try:
                await process.wait()
                await error_line
            finally:
                del self._running[process]

    async def close(self) -> None:
        """Stop running forks."""
        for process in self._running:
            with suppress(ProcessLookupError):  # it has ended; a child of it has not
                process.terminate()
        await asyncio.gather(*self._running.values(), return_exceptions=True)


def _typed(request: AskedFork, run_name: str) -> str:
    words = ("fork", request.record, "--turn", str(request.turn), "--run_name", run_name)
    return one_line(typed_command(*words, "--config", "CONFIG.yaml"))


def _command(request: AskedFork, config_path: Path, edit: Path | None) -> Sequence[str]:
    argv = [sys.executable, "-m", "agentrl", "fork", f"--turn={request.turn}", "--json"]
    argv += [f"--config={config_path}", f"--tries={request.tries}"]
    for name in ("version", "temperature"):
        value = getattr(request, name)
        argv += [] if value is None else [f"--{name}={value}"]
    argv += [] if edit is None else [f"--edit={edit}"]
    return [*argv, "--", request.record]


@contextmanager
def _edit_file(messages: list[dict[str, Any]] | None) -> Iterator[Path | None]:
    if messages is None:
        yield None
        return
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump({"messages": messages}, file)
        file.flush()
        yield Path(file.name)


async def _last_line(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    last = ""
    async for line in process.stderr:
        last = line.decode("utf-8", "replace").strip() or last
    return last
