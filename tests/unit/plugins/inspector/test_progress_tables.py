"""The progress of a run in the terminal."""

import pytest
from rich.console import Console
from support.stored import fill

from agentrl.plugins.inspector.tables import decisions_page, progress_line, progress_page
from agentrl.schema import Run
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore


async def test_progress_says_which_teacher_the_run_waits_for(store: TrajectoryStore) -> None:
    await fill(store, 1)
    await store.runs.create(
        Run(name=store.database_name, status="training", config={"teachers": ["big"]})
    )
    view = await store.reports.overview(DEFAULT_CONSUMER)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(progress_page(view))
    waits = "no logprobs of teacher big yet for 2 records: no process of it is alive; start"
    assert f"waits  {waits}" in captured.get()
    assert waits in progress_line(view)


@pytest.mark.parametrize(
    ("has_branches", "why"),
    [(True, "no turn was trained after which"), (False, "the rollouts are chains")],
)
def test_a_run_without_worst_decisions_says_why(*, has_branches: bool, why: str) -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(decisions_page({"has_branches": has_branches, "rows": []}))
    assert captured.get().startswith(why)
