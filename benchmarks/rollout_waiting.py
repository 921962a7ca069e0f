"""Rollouts that wait for a slow tool, and the memory of the process that holds them."""

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.processes import listening_process
from harness.scripted_engine import ScriptedEngine, serve_script
from harness.server_heartbeats import kept_registered
from rollout_play import MODEL, open_store, play

from agentrl.config.sections import RolloutSection, SamplingSection
from agentrl.inference import ServerPool
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import RegisteredScoring
from agentrl.rollout import RolloutContext
from agentrl.schema import InferenceService, MCPTask
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.tools import ToolsConfig, connect_tools, load_mcp_servers

SLOW_TOOL = Path(__file__).parent / "harness/slow_tool.py"
WAIT_SECONDS = 20.0


async def waiting(mongo: EmbeddedMongo, num_waiting: int) -> dict[str, Any]:
    """Hold rollouts that wait for a slow tool; measure this process's memory."""
    with (
        tempfile.NamedTemporaryFile() as calls,
        listening_process([sys.executable, SLOW_TOOL, calls.name, "{port}"]) as tools,
        serve_script(Renderer.load(MODEL), _call_slowly) as engine,
    ):
        return await _hold(mongo, engine, f"{tools}/mcp", Path(calls.name), num_waiting)


def _call_slowly(prompt: str) -> str:
    call = json.dumps({"name": "slow", "arguments": {"seconds": WAIT_SECONDS}})
    has_called = (
        "<tool_response>" in prompt.rpartition("<|im_start|>assistant")[0].partition("wait!")[2]
    )
    return "<answer>1</answer>" if has_called else f"<tool_call>\n{call}\n</tool_call>"


async def _hold(
    mongo: EmbeddedMongo, engine: ScriptedEngine, tools_url: str, calls: Path, num_waiting: int
) -> dict[str, Any]:
    tools = ToolsConfig(servers=load_mcp_servers(tools_url), call_timeout_seconds=600)
    async with open_store(mongo) as store, connect_tools(tools) as toolbox, ServerPool() as pool:
        await store.tasks.add(
            MCPTask(
                id=f"train/0/{n}",
                order=n,
                num_generations=8,
                query="wait!",
                answer="1",
                scorer="exact",
            )
            for n in range(num_waiting // 8)
        )
        context = RolloutContext(
            store=store,
            servers=pool,
            renderer=engine.renderer,
            toolbox=toolbox,
            scoring=RegisteredScoring(),
            rollout=RolloutSection(
                max_concurrent_samples_per_process=num_waiting,
                target_concurrency=num_waiting,
                exit_when_done=True,
            ),
            sampling=SamplingSection(max_new_tokens=200),
        )
        server = InferenceService(
            id="engine", base_url=engine.base_url, backend="embedded", model_path="scripted"
        )
        before = resident_mb()
        async with kept_registered(store, server):
            playing = asyncio.create_task(play(store, context))
            started = time.perf_counter()
            await _until_called(calls, num_waiting, playing)
            samples = [resident_mb()]
            for _ in range(round(WAIT_SECONDS / 2)):
                await asyncio.sleep(1.0)
                samples.append(resident_mb())
            await playing
            seconds = time.perf_counter() - started
    return {
        "rollouts": num_waiting,
        "resident_mb_before": before,
        "resident_mb_waiting": samples,
        "growth_mb_while_waiting": samples[-1] - samples[0],
        "kb_a_rollout": (samples[0] - before) * 1024 / num_waiting,
        "seconds": seconds,
    }


async def _until_called(calls: Path, count: int, playing: asyncio.Task[None]) -> None:
    while not playing.done():
        text = await asyncio.to_thread(calls.read_text)
        if text.count("\n") >= count:
            return
        await asyncio.wait([playing], timeout=0.2)


def resident_mb() -> float:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
