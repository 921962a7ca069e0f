"""Which experts a server chose goes with the turns into the store and on to the trainer."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.processes import engine_process
from starlette.responses import JSONResponse, Response
from support.engines import prompt
from support.play import ExactScoring, claim
from support.stored import make_task
from support.stub_server import generation, stub_server
from support.training import write_model, write_moe_model

from agentrl.config.sections import RolloutSection, SamplingSection
from agentrl.data.rows import TokenTree
from agentrl.data.tokens import turn_tokens, with_routed_experts
from agentrl.errors import ConfigError, InferenceError
from agentrl.inference import ServerPool
from agentrl.models.checkpoints.resolve import check_router_replay
from agentrl.models.load import load_policy
from agentrl.models.policy import target_logprobs
from agentrl.models.router_replay import make_routers_replay
from agentrl.renderers.conversation import Prompt
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import MCPSampler, RolloutContext
from agentrl.schema import InferenceService, Run
from agentrl.store import TrajectoryStore
from agentrl.tools import ToolsConfig, connect_tools

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe_model(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def engine_url(moe_path: Path) -> Iterator[str]:
    with engine_process(moe_path) as url:
        yield url


async def sampled(store: TrajectoryStore, model: Path, url: str) -> tuple[MCPSampler, list[Prompt]]:
    """Three turns: one, one that goes on from all of it, and one that branches off inside it."""
    await store.runs.create(Run(name="test", status="training", admitted_groups=1000))
    await store.tasks.add([make_task(0)])
    record, task = await claim(store)
    async with connect_tools(ToolsConfig(servers={})) as toolbox, ServerPool() as servers:
        servers.update(
            [InferenceService(id="e", base_url=url, backend="embedded", model_path=str(model))]
        )
        context = RolloutContext(
            store=store,
            servers=servers,
            renderer=Renderer.load(model),
            toolbox=toolbox,
            scoring=ExactScoring(),
            rollout=RolloutSection(),
            sampling=SamplingSection(max_new_tokens=9),
            router_replay=True,
        )
        sampler = MCPSampler(task, record, context)
        prompts = [Prompt(prompt(1, 20), None, 0, None)]
        first, _ = await sampler.sample(prompts[0])
        full = np.concatenate([prompts[0].ids, first.output_ids])
        prompts.append(Prompt(np.concatenate([full, prompt(2, 6)]), 0, len(full), None))
        await sampler.sample(prompts[1])
        prompts.append(Prompt(np.concatenate([full[:12], prompt(3, 8)]), 0, 12, "summary"))
        await sampler.sample(prompts[2])
        await sampler.finish()
    return sampler, prompts


async def test_stored_experts_are_those_that_the_model_chose(
    store: TrajectoryStore, moe_path: Path, engine_url: str
) -> None:
    sampler, prompts = await sampled(store, moe_path, engine_url)
    turns = await store.turns.of_record(sampler.record.id)
    assert [turn.routed_bytes for turn in turns] == [1, 1, 1]
    # 3 layers of 2 experts: 6 bytes for each token that the turn was the first to compute.
    assert [len(turn.routed_experts) for turn in turns] == [
        6 * (len(p.ids) + len(t.output_ids) - 1 - max(p.shared_len - 1, 0))
        for p, t in zip(prompts, turns, strict=True)
    ]
    tree = TokenTree.from_tokens(with_routed_experts(turn_tokens(turns), turns))
    row = tree.row
    assert row.routed_experts is not None
    assert row.routed_experts.shape == (row.num_tokens, 6)
    policy = load_policy(moe_path)
    make_routers_replay(policy.model)
    seen: list[torch.Tensor] = []
    for layer in policy.model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: seen.append(output[2]))
    own = target_logprobs(policy, replace(row, routed_experts=None)).logprobs
    chosen = torch.stack([torch.zeros_like(seen[0]), *seen], dim=1).flatten(1).numpy()
    assert np.array_equal(row.routed_experts, chosen)
    assert torch.equal(target_logprobs(policy, row).logprobs, own)
    behavior = np.concatenate([t.behavior_logprobs for b in tree.branches for t in b.turns])
    np.testing.assert_allclose(own.detach().numpy(), behavior, atol=1e-4)


async def test_a_server_that_says_nothing_about_experts_ends_the_attempt(
    store: TrajectoryStore, moe_path: Path
) -> None:
    async def silent(_: dict[str, Any]) -> Response:
        return JSONResponse(generation([7, 8]))

    async with stub_server(silent) as stub:
        with pytest.raises(InferenceError, match="returned 0 experts for 21 tokens; start SGLang"):
            await sampled(store, moe_path, stub.url)
    assert stub.bodies[0]["return_routed_experts"] is True
    assert stub.bodies[0]["routed_experts_start_len"] == 0


def test_dense_models_have_nothing_to_replay(moe_path: Path, tmp_path: Path) -> None:
    check_router_replay(moe_path)
    with pytest.raises(ConfigError, match=r"--router_replay needs a mixture-of-experts.*is dense"):
        check_router_replay(write_model(tmp_path))
