"""What tests of rollouts share: a context over real clients, a run with one task, a fake scorer."""

import json
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from harness.processes import listening_process

from agentrl.config.sections import RolloutSection, SamplingSection
from agentrl.errors import ScoringError
from agentrl.inference import ServerPool
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import Rollout
from agentrl.rollout import MCPSampler, RolloutContext, RolloutResult
from agentrl.rollout.context import Scoring
from agentrl.schema import DispatchedSamplingTask, InferenceService, MCPTask, Record, Run, Score
from agentrl.store import TrajectoryStore
from agentrl.tools import ToolsConfig, connect_tools, load_mcp_servers

TOOL_SERVER = Path(__file__).with_name("tool_server.py")


@contextmanager
def run_tool_server(log_file: Path) -> Iterator[str]:
    """Run the tool server as a process over streamable HTTP; yields its address."""
    with listening_process([sys.executable, TOOL_SERVER, log_file, "{port}"]) as url:
        yield f"{url}/mcp"


def tool_call(name: str, **arguments: Any) -> str:
    """Return a tool call as the model would write it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


class Serving(Protocol):
    """An engine that answers at an address, scripted or not."""

    @property
    def renderer(self) -> Renderer:
        """What it speaks."""

    @property
    def base_url(self) -> str:
        """Where it answers."""


class ExactScoring:
    """Compares answers as text; `outages` scorings fail first."""

    def __init__(self, outages: int = 0) -> None:
        self.outages = outages
        self.num_scored = 0

    def check(self, scorer: str) -> None:
        """Any name stands for the comparison of texts."""

    def extract_answer(self, text: str, schema: str) -> str | None:
        _, opened, rest = text.rpartition(f"<{schema}>")
        answer, closed, _ = rest.partition(f"</{schema}>")
        return answer.strip() if opened and closed else None

    async def score(
        self, task: MCPTask, answer: str | None, rollout: Rollout | None = None
    ) -> Score:
        if self.outages > 0:
            self.outages -= 1
            raise ScoringError("the judge is away")
        self.num_scored += 1
        return Score(scorer=task.scorer, value=float(answer == str(task.answer)))

    def takes_rollout(self, scorer: str) -> bool:
        return False

    def sees_group(self, scorer: str) -> bool:
        return False

    def share_limits(self, num_samplers: int) -> None:
        """It asks no judge."""

    async def score_group(self, task: MCPTask, records: Sequence[Record]) -> list[Score]:
        raise ScoringError("it compares single answers")


async def begin_run(store: TrajectoryStore, engine: Serving, *tasks: MCPTask) -> None:
    """Create the run, admit everything, register the engine and add the tasks."""
    await store.runs.create(Run(name="test", status="training", admitted_groups=1000))
    await store.services.register(service(engine))
    await store.tasks.add(tasks)


def service(engine: Serving) -> InferenceService:
    """Return the engine's registration."""
    return InferenceService(
        id="engine", base_url=engine.base_url, backend="embedded", model_path="scripted"
    )


@asynccontextmanager
async def open_play(
    store: TrajectoryStore,
    engine: Serving,
    tools: str | dict[str, Any] | None,
    *,
    rollout: RolloutSection | None = None,
    sampling: SamplingSection | None = None,
    scoring: Scoring | None = None,
    context_length: int | None = None,
) -> AsyncIterator[RolloutContext]:
    """Yield a context whose clients are real."""
    renderer = engine.renderer
    config = ToolsConfig(
        servers={} if tools is None else load_mcp_servers(tools),
        max_retries=0,
        show_images=renderer.shows_images_of("tool"),
    )
    async with connect_tools(config) as toolbox, ServerPool() as servers:
        servers.update([service(engine)])
        yield RolloutContext(
            store=store,
            servers=servers,
            renderer=renderer,
            toolbox=toolbox,
            scoring=scoring or ExactScoring(),
            rollout=rollout or RolloutSection(max_turns=5),
            sampling=sampling or SamplingSection(max_new_tokens=200),
            context_length=context_length,
        )


async def claim(store: TrajectoryStore) -> tuple[Record, MCPTask]:
    """Claim the next slot as a process called `tester`."""
    claimed = await store.records.claim(
        "tester", lease_seconds=30, admitted_groups=1000, max_attempts=3
    )
    assert claimed is not None
    record, task = claimed
    assert isinstance(task, MCPTask)
    return record, task


async def play(
    store: TrajectoryStore, context: RolloutContext
) -> tuple[RolloutResult, list[DispatchedSamplingTask]]:
    """Play the next slot with an `MCPSampler`; return its result and its turns."""
    record, task = await claim(store)
    sampler = MCPSampler(task, record, context)
    result = await sampler.run()
    await sampler.finish()
    return result, await store.turns.of_record(record.id)
