"""A run for the rollout benchmark's samplers: its database and its model."""

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.rollout import MCPSampler, RolloutContext
from agentrl.rollout.worker.sampling_loop import SamplingLoop
from agentrl.schema import Run
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

MODEL = Path(__file__).resolve().parents[1] / "assets/demo/model"


def deepened(target: Path, depth: int) -> Path:
    """Write the demo's model with additional layers whose outputs are all zero; return its path."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    config = AutoConfig.from_pretrained(MODEL)
    config.num_hidden_layers *= depth
    config.layer_types = config.layer_types * depth
    deep: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    deep.load_state_dict(model.state_dict(), strict=False)
    for layer in deep.model.layers[model.config.num_hidden_layers :]:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(projection.weight)
    shutil.copytree(MODEL, target, ignore=shutil.ignore_patterns("*.safetensors"))
    deep.save_pretrained(target)
    return target


@asynccontextmanager
async def open_store(mongo: EmbeddedMongo) -> AsyncIterator[TrajectoryStore]:
    """Yield a new, empty store."""
    async with TrajectoryStore.connect(mongo.uri(f"bench_{uuid.uuid4().hex[:8]}")) as store:
        await store.ensure_schema()
        await store.runs.create(Run(name="bench", status="training", admitted_groups=1_000_000))
        yield store
        await store.drop_database()


async def play(store: TrajectoryStore, base: RolloutContext) -> None:
    """Run all tasks of the store."""
    loop = SamplingLoop(replace(base, store=store), "bench", MCPSampler)
    await loop.run(asyncio.Event(), asyncio.Event())
