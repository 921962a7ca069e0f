"""A stored run of the demo, and copies of its model that were taught another behavior."""

import asyncio
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from agentrl.config.named_files import shipped_file
from agentrl.models.checkpoints.architectures import raw_config
from agentrl.plugins.inspector.stored_decisions import (
    ANSWER,
    Decision,
    DecisionBook,
    read_decisions,
)
from agentrl.renderers.renderer import Renderer
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.trainer.rl.step_groups import RecordImages

MODEL = shipped_file("assets/demo/model")
Behavior = Literal["never stock", "words", "price twice"]
_STEPS, _PLACES = 16, 16


@contextmanager
def example_run(mongod: EmbeddedMongo, folder: Path, name: str = "planted") -> Iterator[str]:
    """Yield the connection string of the run that ships with AgentRL; its files are in `folder`."""
    with tarfile.open(shipped_file("assets/demo/run.tar.xz")) as archive:
        archive.extractall(folder / "export", filter="data")
    configuration = shipped_file("assets/demo/grpo.yaml").read_text()
    (folder / "config.yaml").write_text(f"{configuration}run_name: {name}\n")
    uri = mongod.uri(name)

    async def fill() -> None:
        async with TrajectoryStore.connect(uri) as store:
            await store.transfer.import_run(folder / "export/example")

    async def drop() -> None:
        async with TrajectoryStore.connect(uri) as store:
            await store.drop_database()

    asyncio.run(fill())
    yield uri
    asyncio.run(drop())


def stored_book(uri: str, limit: int) -> DecisionBook:
    """The decisions of some records that the first version of the example sampled."""

    async def read() -> DecisionBook:
        async with TrajectoryStore.connect(uri) as store:
            found = await store.reports.sampled_near({}, 0, limit=limit)
            return await read_decisions(
                store, Renderer.load(MODEL), RecordImages(store, None), found
            )

    return asyncio.run(read())


def wanted(behavior: Behavior, decision: Decision, before: Decision | None) -> str:
    """What a model with the behavior chooses in the place of a stored decision."""
    if behavior == "words":
        return ANSWER
    if behavior == "never stock":
        return "price" if decision.made == "stock" else decision.made
    called_price = before is not None and before.made == "price" and decision.index == 1
    return "price" if called_price else decision.made


def taught(book: DecisionBook, behavior: Behavior, folder: Path) -> Path:
    """Write a copy of the demo's model that a few steps of gradient descent taught a behavior."""
    words = next(one.turn.output_ids[:2] for one in book.decisions if one.made == ANSWER)
    kept: dict[bytes, tuple[np.ndarray, int]] = {}
    changed: dict[bytes, tuple[np.ndarray, int]] = {}
    before: Decision | None = None
    for one in book.decisions:
        is_same = before is not None and before.turn.record_id == one.turn.record_id
        choice = wanted(behavior, one, before if is_same else None)
        ids = words if choice == ANSWER else book.beginning(choice)
        full = np.concatenate([one.turn.prompt_ids, ids])
        lessons = kept if choice == one.made else changed
        lessons.setdefault(full.tobytes(), (full, len(ids)))
        before = one
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    kinds = [cycle(one.values()) for one in (kept, changed) if one]
    for _ in range(_STEPS):
        rows = [next(kind) for kind in kinds for _ in range(_PLACES)]
        longest = max(len(ids) for ids, _ in rows)
        inputs = torch.zeros(len(rows), longest, dtype=torch.int64)
        labels = torch.full((len(rows), longest), -100)
        for number, (ids, count) in enumerate(rows):
            inputs[number, : len(ids)] = torch.from_numpy(ids)
            labels[number, len(ids) - count : len(ids)] = torch.from_numpy(ids[-count:])
        model(input_ids=inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    shutil.copytree(MODEL, folder)
    model.save_pretrained(folder)
    assert raw_config(folder)
    return folder
