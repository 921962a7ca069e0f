"""What kills a server, or makes it fail, is stopped at the agents' endpoint before it gets there."""

from dataclasses import dataclass
from typing import Any

import httpx
from harness.attacks.hostile_requests import CALLS, CALLS_WITH_SCHEMAS, CHAT
from support.agents import MODEL, open_stage
from support.engines import Served
from support.play import begin_run

from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import RolloutResult
from agentrl.rollout.agent import AgentEndpoint
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore

JSON = {"Content-Type": "application/json"}
TASK = MCPTask(id="train/0/q1", query="?", answer="7")
BODIES = CALLS + CALLS_WITH_SCHEMAS


@dataclass(frozen=True)
class Engine:
    """A served model as a run has it."""

    base_url: str
    renderer: Renderer


async def test_a_killing_request_is_stopped_before_the_server(
    store: TrajectoryStore, served: Served, client: SGLangClient
) -> None:
    statuses: list[int] = []

    async def agent(_: MCPTask, endpoint: AgentEndpoint) -> str:
        key = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with httpx.AsyncClient(trust_env=False, timeout=60, headers=key) as http:
            before = await client.loads()
            for body in BODIES:
                route = "completions" if '"prompt"' in body else "chat/completions"
                content = body.replace('"model": "m"', f'"model": "{MODEL}"').encode()
                answer = await http.post(
                    f"{endpoint.base_url}/{route}", content=content, headers=JSON
                )
                statuses.append(answer.status_code)
            assert (await client.loads()).num_running == before.num_running
            well: dict[str, Any] = {**CHAT, "model": MODEL, "max_tokens": 4}
            answer = await http.post(f"{endpoint.base_url}/chat/completions", json=well)
            assert answer.status_code == 200, answer.text
        return "7"

    engine = Engine(served.url, Renderer.load(served.first))
    await begin_run(store, engine, TASK)
    async with open_stage(store, engine) as stage:
        result, turns = await stage.play(agent)
    assert statuses == [400] * len(BODIES)
    assert result == RolloutResult("answered", "7")
    assert len(turns) == 1  # the ordinary one
    assert await client.health()
