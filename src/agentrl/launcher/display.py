"""Progress of a run for a person: a live panel on a terminal, one line a step elsewhere."""

import asyncio
import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from agentrl.errors import StoreError
from agentrl.launcher.run_warnings import RunWarnings
from agentrl.store import RunProgress, TrajectoryStore

REFRESH_SECONDS = 0.5
RATE_WINDOW_SECONDS = 20.0
CURVE_STEPS = 60
_BARS = "▁▂▃▄▅▆▇█"


class Rates:
    """Samples and tokens a second over the last `RATE_WINDOW_SECONDS`."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()
        self.samples = 0.0
        """Scored samples a second, evaluations included."""
        self.tokens = 0.0
        """Sampled tokens a second."""

    def add(self, progress: RunProgress) -> None:
        """Take in the counts as they are now."""
        scored = progress.records.get("scored", 0) + progress.eval_records.get("scored", 0)
        now = time.monotonic()
        self._seen.append((now, scored, progress.num_output_tokens))
        while now - self._seen[0][0] > RATE_WINDOW_SECONDS:
            self._seen.popleft()
        then, scored_then, tokens_then = self._seen[0]
        passed = max(now - then, 1e-9)
        # Counts may fall: a database that was dropped starts at zero again.
        self.samples = max(0.0, (scored - scored_then) / passed)
        self.tokens = max(0.0, (progress.num_output_tokens - tokens_then) / passed)


class Display:
    """Follows a run through the store and its metrics file until it is cancelled."""

    def __init__(
        self, console: Console, store: TrajectoryStore, *, metrics_path: Path, max_steps: int
    ) -> None:
        self._console = console
        self._store = store
        self._metrics_path = metrics_path
        self._max_steps = max_steps
        self._steps: list[dict[str, Any]] = []
        self._offset = 0
        self._inode = 0
        self._rates = Rates()
        self._warnings = RunWarnings(store)
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._bar_task = self._bar.add_task("step", total=max_steps)

    async def follow(self) -> None:
        """Show the run until cancelled."""
        if not self._console.is_terminal:
            while True:
                for step in self._new_steps():
                    self._console.print(self._line(step), highlight=False, soft_wrap=True)
                await self._warn()
                await asyncio.sleep(REFRESH_SECONDS)
        with Live(console=self._console, refresh_per_second=4, transient=False) as live:
            while True:
                self._new_steps()
                await self._warn()
                live.update(self._panel(await self._progress()))
                await asyncio.sleep(REFRESH_SECONDS)

    async def _warn(self) -> None:
        for text in await self._warnings.new():
            self._console.print(
                f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True
            )

    async def _progress(self) -> RunProgress | None:
        """Return the run's counts; None before the run exists or while the store is unreachable."""
        try:
            return await self._store.reports.progress()
        except StoreError:
            return None

    def _new_steps(self) -> list[dict[str, Any]]:
        """Return the metrics lines that were added since the last call."""
        if not self._metrics_path.exists():
            return []
        with self._metrics_path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                # A trainer that resumes replaces the file with the steps that it builds on.
                self._inode, self._offset, self._steps = inode, 0, []
            file.seek(self._offset)
            chunk = file.read()
        whole = chunk.rpartition(b"\n")[0]
        self._offset += len(whole) + 1 if whole else 0
        new = [json.loads(line) for line in whole.splitlines() if line.strip()]
        self._steps += new
        return new

    def _line(self, step: dict[str, Any]) -> str:
        reward = step.get("reward_mean")
        shown = "   -  " if reward is None else f"{reward:6.3f}"
        seconds = step.get("seconds", {})
        total = sum(seconds.values())
        return (
            f"step {step['step']:4d}/{self._max_steps}  reward {shown}  "
            f"staleness {_mean_staleness(step):4.2f}  groups {step['num_groups']:3d}  "
            f"tokens {step['num_output_tokens']:6d}  {total:5.1f} s "
            f"(waited {seconds.get('wait_samples', 0.0):4.1f})"
        )

    def _panel(self, progress: RunProgress | None) -> RenderableType:
        done = self._steps[-1]["step"] if self._steps else 0
        self._bar.update(self._bar_task, completed=done)
        table = Table.grid(padding=(0, 3))
        table.add_column(justify="right", style="dim")
        table.add_column()
        table.add_column(justify="right", style="dim")
        table.add_column()
        rewards = [s["reward_mean"] for s in self._steps if s.get("reward_mean") is not None]
        if progress is not None:
            self._rates.add(progress)
        last = self._steps[-1] if self._steps else {}
        table.add_row(
            "reward",
            f"[bold]{rewards[-1]:.3f}[/]" if rewards else "-",
            "samples/s",
            f"{self._rates.samples:.1f}",
        )
        table.add_row(
            "staleness",
            f"{_mean_staleness(last):.2f}" if last else "-",
            "tokens/s",
            f"{self._rates.tokens:.0f}",
        )
        if progress is not None:
            table.add_row(
                "policy",
                f"v{progress.policy_version}",
                "rollouts",
                f"{progress.records.get('running', 0)} running, "
                f"{progress.num_groups_ready} groups ready",
            )
        curve = _curve(rewards[-CURVE_STEPS:])
        return Panel(Group(self._bar, table, curve), title="AgentRL", title_align="left")


def _curve(rewards: list[float]) -> str:
    """Return the rewards as a line of bars; the scale is 0 to 1, or wider when they are."""
    if not rewards:
        return "waiting for the first step"
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    top = len(_BARS) - 1
    return "".join(_BARS[round((reward - low) / (high - low) * top)] for reward in rewards)


def _mean_staleness(step: dict[str, Any]) -> float:
    counts = {int(age): count for age, count in step.get("staleness", {}).items()}
    total = sum(counts.values())
    return sum(age * count for age, count in counts.items()) / total if total else 0.0
