"""A run on questions with images, whole: engine, sampler, database, trainer, and again the engine."""

import asyncio
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.tiny_vision import picture, vision_checkpoint
from safetensors.torch import load_file
from support.demo_run import RUN_NAME, logs, run_command

from agentrl.data.batch import build_step
from agentrl.data.select import SelectedGroup
from agentrl.data.tokens import turn_tokens
from agentrl.models.load import load_policy, read_config
from agentrl.models.policy import target_logprobs
from agentrl.models.vision.image_reader import ImageReader
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.trainer.rl.step_groups import RecordImages

torch.set_num_threads(1)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SCORER = '''
from agentrl.rewards import GroundTruth, MCPScorerFactory


@MCPScorerFactory.register_scorer("letters")
def letters(answer: str, truth: GroundTruth) -> float:
    """Something that random answers differ in."""
    return sum(map(str.isalpha, answer)) / (1 + len(answer))
'''


AGENT = """
from pathlib import Path

from openai import AsyncOpenAI

from agentrl.rollout.agent import AgentEndpoint
from agentrl.schema import MCPTask
from agentrl.schema.image import image_from_bytes

OWN = image_from_bytes(Path(__file__).with_name("own.jpg").read_bytes()).data_url


async def play(task: MCPTask, endpoint: AgentEndpoint) -> str:
    def shown(url: str) -> dict[str, object]:
        return {"type": "image_url", "image_url": {"url": url}}

    words = {"type": "text", "text": task.query}
    messages = [{"role": "user", "content": [*map(shown, task.images), words]}]
    said = ""
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        for _ in range(2):
            completion = await client.chat.completions.create(
                model=endpoint.model, messages=messages
            )
            said += completion.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": [shown(OWN), words]})
    return said
"""


def questions(folder: Path) -> Path:
    """Two questions in three show images; two of these the same one."""
    entries = []
    for number in range(6):
        entry: dict[str, object] = {"query": f"question {number}?", "answer": "7"}
        if number % 3:
            name = f"chart{number % 3}.png"
            (folder / name).write_bytes(picture(number, 40, 24))
            entry["images"] = [name]
        entries.append(entry)
    path = folder / "questions.jsonl"
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return path


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
async def test_questions_with_images_are_sampled_and_trained(family: str, tmp_path: Path) -> None:
    model = vision_checkpoint(tmp_path / "model", family)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "own.jpg").write_bytes(picture(9, 20, 20, "JPEG"))
    (tmp_path / "scorers.py").write_text(SCORER)
    command = run_command(
        tmp_path,
        model_name_or_path=model,
        train_file=questions(tmp_path),
        eval_file="none",
        tool_server_command="none",
        agent=f"{tmp_path / 'agent.py'}:play",
        scorer_module=tmp_path / "scorers.py",
        default_scorer="letters",
        groups_per_step=3,
        max_steps=2,
        max_new_tokens=24,
        max_tokens=64,
        verify_merge=1,
        train_vision="true",
        num_processes=2 if family == "qwen3_vl" else 1,
    )
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr + logs(tmp_path)
    metrics = [
        json.loads(line) for line in (tmp_path / "output/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in metrics] == [1, 2]
    assert all(line["merge_error"] <= 1e-4 and line["grad_norm"] > 0 for line in metrics)
    exported = next((tmp_path / "output/checkpoints").glob("*2/**/model.safetensors"))
    before, after = load_file(model / "model.safetensors"), load_file(exported)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("language_model" in name for name in changed)
    assert any("vis" in name for name in changed), "--train_vision"
    assert (exported.parent / "preprocessor_config.json").is_file()
    await check_logprobs(tmp_path, model)


async def check_logprobs(folder: Path, model: Path) -> None:
    """The logprobs that the engine sampled with are the trainer's, to the token."""
    policy, reader = load_policy(model), ImageReader(read_config(model), model)
    num_seen = 0
    with EmbeddedMongo(folder / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri(RUN_NAME), RUN_NAME) as store:
            images = RecordImages(store, reader)
            async for record in store.records.find(status="scored", split="train"):
                stored = await store.turns.of_record(record.id)
                book = await images.book(stored)
                for turn in turn_tokens(stored, book):
                    # Sampled after the first step, or with the token of an image that there is not.
                    if turn.versions.any() or book.stray_tokens(turn.full_ids, turn.images):
                        continue
                    num_seen += bool(turn.images)
                    group = SelectedGroup("t", (record.id,), (1.0,), (turn,))
                    step = build_step([group], policy_version=0, token_budget=10**6)
                    ((batch,),) = step.micro_batches
                    found = target_logprobs(policy, batch.row).logprobs.detach().numpy()
                    assert np.abs(found - batch.behavior_logprobs).max() <= 1e-4
    assert num_seen > 0
