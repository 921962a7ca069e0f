"""Every code block of docs/bring-your-own.md, run in order, and the samplers of examples/math."""

import asyncio
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.scripted_engine import serve_script
from harness.tiny_tokenizer import write_tokenizer
from support.doc_blocks import run_shell, write_blocks
from support.play import service

from agentrl.config.loading import build_config
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import SamplingScheduler
from agentrl.schema import Run
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

ROOT = Path(__file__).parents[2]


def as_model(prompt: str) -> str:
    """Use the tool and answer, guess by halves, or solve and note."""
    if "Guess a number" in prompt:
        low, high = 1, 100
        for guess, hint in re.findall(r"assistant\n(\d+)<\|im_end\|>.*?It is (\w+)", prompt, re.S):
            low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
        return str((low + high) // 2)
    if "somebody who is about to try" in prompt:
        return "count twice"
    if "\\boxed" in prompt:
        return "It is \\boxed{0.5}."
    found = re.search(r"<tool_response>\n(\d+)", prompt)
    item = "lamp" if "lamps" in prompt else "rug"
    call = f'{{"name": "in_stock", "arguments": {{"item": "{item}"}}}}'
    return f"<answer>{found[1]}</answer>" if found else f"<tool_call>\n{call}\n</tool_call>"


async def test_every_block_of_bring_your_own_runs_as_printed(
    mongod: EmbeddedMongo, tmp_path: Path
) -> None:
    num_blocks, commands = await asyncio.to_thread(write_blocks, "bring-your-own.md", tmp_path)
    assert num_blocks == 13
    model = write_tokenizer(tmp_path / "model")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in (str(ROOT / "src"), str(tmp_path)) if path),
        "MONGODB_URI": mongod.uri("mine"),
        "MODEL": str(model),
    }
    async with TrajectoryStore.connect(mongod.uri("mine"), "mine") as store:
        await store.ensure_schema()
        await store.runs.create(Run(name="mine", status="training", admitted_groups=1000))
        with serve_script(Renderer.load(model), as_model) as engine:
            printed = []
            for text in commands:
                # Anew for each: a server that is silent for long is taken for gone.
                await store.services.register(service(engine))
                printed.append(await asyncio.to_thread(run_shell, text, tmp_path, environment))
        assert "train/0/q1  completed  score 1.000  2 scored" in printed[0]
        assert "train/0/q2  completed  score 1.000  2 scored" in printed[0]
        assert "train/0/q3  completed  score 1.000  2 scored" in printed[1]
        (first, second) = await store.turns.of_record("train/0/q3/0")
        assert (first.tool_calls[0].name, first.tool_results[0].content) == ("in_stock", "7")
        assert (second.parent, second.branch_reason) == (0, None)
        for number in (3, 50):
            (record,) = await store.records.of_task(f"train/0/g{number}")
            assert record.score is not None
            assert (record.final_answer, record.score.value) == (str(number), 1.0)
        await store.drop_database()


@pytest.fixture(scope="module")
def samplers() -> Any:
    spec = importlib.util.spec_from_file_location(
        "math_samplers", ROOT / "examples/math/samplers.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["MathSampler", "NotesSampler"])
async def test_the_math_samplers_play_score_and_pass_notes_on(
    store: TrajectoryStore, mongo_uri: str, tmp_path: Path, samplers: Any, name: str
) -> None:
    model = write_tokenizer(tmp_path / "model")
    path = tmp_path / "problems.jsonl"
    path.write_text('{"id": "p", "problem": "What is half of \\\\boxed{1}?", "answer": "1/2"}\n')
    await store.runs.create(Run(name="math", status="training", admitted_groups=1000))
    config = build_config(
        {
            "run_name": mongo_uri.partition("?")[0].rpartition("/")[2],
            "db_connection_string": mongo_uri,
            "model_name_or_path": str(model),
            "max_concurrent_samples_per_process": "1",
            "exit_when_done": "true",
        }
    )
    with serve_script(Renderer.load(model), as_model) as engine:
        await store.services.register(service(engine))
        # Of two tries one may begin before the other has its score; the third comes after one.
        tasks = list(samplers.problems(path, num_generations=3))
        status = await SamplingScheduler(config, getattr(samplers, name), tasks, "train").run()
        prompts = [engine.renderer.decode(body["input_ids"]) for body in engine.requests]
    assert status == 0
    records = await store.records.of_task("train/0/p")
    assert [r.score.value for r in records if r.score is not None] == [1.0, 1.0, 1.0]
    noted = [prompt for prompt in prompts if "- count twice" in prompt]
    assert bool(noted) == (name == "NotesSampler")
