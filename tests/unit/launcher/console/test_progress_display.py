"""The lines of a run where nothing can be drawn in place."""

import asyncio
import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console
from support.stored import claim, make_task, play

from agentrl.config.loading import load_config
from agentrl.launcher.console import progress_display
from agentrl.launcher.console.progress_display import ProgressDisplay, draws_in_place
from agentrl.schema import Run, RunPhase
from agentrl.store import TrajectoryStore


def metrics_line(step: int, ended_at: float) -> str:
    line = {
        "step": step,
        "reward_mean": 0.5,
        "num_groups": 4,
        "num_trained_tokens": 100,
        "seconds": {"wait_samples": 1.0},
        "time": ended_at,
    }
    return json.dumps(line) + "\n"


class Followed:
    """A display that is followed into text."""

    def __init__(self, store: TrajectoryStore, path: Path) -> None:
        self._text = io.StringIO()
        console = Console(file=self._text, width=80)
        config = load_config({"output_dir": str(path), "max_steps": "9", "num_generations": "1"})
        self.display = ProgressDisplay(console, store, config)

    async def until(self, words: str) -> list[str]:
        """Return the lines once `words` were said."""
        async with asyncio.timeout(20):
            while words not in self._text.getvalue():
                await asyncio.sleep(0.01)
        return self._text.getvalue().splitlines()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_display, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(progress_display, "READ_SECONDS", 0.0)


async def test_without_a_terminal_there_is_a_line_a_step_and_one_a_phase_before(
    store: TrajectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(metrics_line(1, time.time() - 100))  # of the run's earlier life
    followed = Followed(store, tmp_path)
    following = asyncio.create_task(followed.display.follow())
    try:
        await followed.until("starting the processes")
        await store.runs.create(Run(name=store.database_name))
        phases: list[tuple[RunPhase, str]] = [
            ("loading", "loading the model"),
            ("sampling", "sampling: 0 of 1 groups ready"),
        ]
        for phase, words in phases:
            await store.runs.set_phase(phase)
            await followed.until(words)
        with path.open("a") as file:
            file.write(metrics_line(2, time.time() + 100))
        await followed.until("step    2/9")
        await store.runs.set_phase("training")  # of every step, which has a line of its own
        monkeypatch.setattr(progress_display, "QUIET_SECONDS", 0.2)
        lines = await followed.until("training step 3")
    finally:
        following.cancel()
    assert [line.split("  ")[-1] for line in lines[:3]] == [
        "starting the processes",
        "loading the model",
        "sampling: 0 of 1 groups ready",
    ]
    assert lines[3].startswith("step    2/9  reward  0.500")
    assert len([line for line in lines if line.startswith("step")]) == 1


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_a_terminal_of_its_own_is_drawn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert draws_in_place(Console(file=_Terminal(), force_terminal=True))
    assert not draws_in_place(Console(file=_Terminal(), _environ={"TERM": "dumb"}))
    # Kernels of notebooks ask every program for colors, and run `!` on a terminal that nobody sees.
    assert not draws_in_place(Console(file=io.StringIO(), _environ={"FORCE_COLOR": "1"}))
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert not draws_in_place(Console(file=_Terminal(), force_terminal=True))


async def test_the_last_evaluations_are_read_from_the_store(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    for version in (0, 5, 10):
        tag = f"eval@{version}"
        tasks = [make_task(n, split="eval", tag=tag) for n in (2 * version, 2 * version + 1)]
        await store.tasks.add(tasks)
    display = Followed(store, tmp_path).display
    for _ in range(6):
        await play(store, await claim(store), score=0.5)
    await display.update()
    shown = [(one.version, one.num_completed, one.mean_score) for one in display.view.evaluations]
    # Slots are claimed in the order of the tasks: all of version 0 and one question of version 5.
    assert shown == [(5, 1, 0.5), (10, 0, None)]
