"""Two gloo ranks compute what one process computes."""

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.command_lines import words_of
from support.patience import PATIENCE
from support.training import Player, train_tasks, write_moe_model

from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

pytestmark = pytest.mark.distributed

REPOSITORY = Path(__file__).parents[2]
ACCELERATE = ["-m", "accelerate.commands.launch", "--config_file", "assets/fsdp2_dst.yml"]

SETTINGS: dict[str, object] = {
    "torch_dtype": "float32",
    "enable_sampling": False,
    "num_generations": 3,
    "groups_per_step": 2,
    # Where a gradient is as small as Adam's eps, its rounding is a share of a whole step.
    "learning_rate": 0.001,
    "max_grad_norm": 0.05,
    "max_staleness": 100,
    "save_steps": 1,
    "save_total_limit": 9,
    "trainer_threads": 1,
    # What is faster may differ between the runs that are compared.
    "merge": "tree",
}


def start(
    uri: str, model: Path, output: Path, *, num_ranks: int, command: str = "train", **flags: object
) -> str:
    """Run an agentrl command to its end and return its output."""
    argv = [sys.executable]
    if num_ranks > 1:
        argv += [*ACCELERATE, "--num_processes", str(num_ranks)]
    argv += ["-m", "agentrl", command]
    settings = SETTINGS | {
        "run_name": uri.partition("?")[0].rpartition("/")[2],
        "output_dir": output,
        "logs_dir": output / "logs",
        "db_connection_string": uri,
        "model_name_or_path": model,
        **flags,
    }
    argv += words_of(settings, output.parent)
    ended = subprocess.run(
        argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    logs = "".join(log.read_text() for log in sorted((output / "logs").glob("*.log")))
    assert ended.returncode == 0, (ended.stdout + ended.stderr + logs)[-3000:]
    return logs


async def fill(uri: str, model: Path, scores: list[list[float]]) -> None:
    async with TrajectoryStore.connect(uri) as store:
        await store.ensure_schema()
        await store.tasks.add(train_tasks(len(scores), len(scores[0])))
        await Player(model).play_groups(store, scores)


def largest_difference(left: Path, right: Path) -> float:
    one, other = load_file(left), load_file(right)
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def weights(output: Path, step: int) -> Path:
    """The one file of a checkpoint's model, or of its adapter."""
    (found,) = (output / f"checkpoints/{step:06d}/model").glob("*.safetensors")
    return found


async def train_alone_and_in_two(
    mongod: EmbeddedMongo, model: Path, folder: Path, **flags: Any
) -> list[Path]:
    """Outputs of four steps by one process, and of three by two ranks and a fourth by one."""
    scores = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]] * 4
    outputs = []
    for parts in ([(1, 4)], [(2, 3), (1, 4)]):
        output = folder / str(len(parts))
        uri = mongod.uri(f"ranks_{uuid.uuid4().hex[:8]}")
        await fill(uri, model, scores)
        for num_ranks, max_steps in parts:
            start(uri, model, output, num_ranks=num_ranks, max_steps=max_steps, **flags)
        outputs.append(output)
    return outputs


def gradient_norms(output: Path) -> torch.Tensor:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return torch.tensor([json.loads(line)["grad_norm"] for line in lines])


IN_CHUNKS = {"max_tokens": 9, "verify_merge": 1, "kl_coefficient": 0.1}


@pytest.mark.parametrize(
    "flags",
    [{"max_tokens": 60}, {"max_tokens": 4096}, IN_CHUNKS],
    ids=["uneven-shares", "one-rank-idle", "in-chunks"],
)
async def test_two_ranks_equal_one_process(
    mongod: EmbeddedMongo, model_path: Path, tmp_path: Path, flags: dict[str, object]
) -> None:
    alone, together = await train_alone_and_in_two(mongod, model_path, tmp_path, **flags)
    assert largest_difference(weights(alone, 3), model_path / "model.safetensors") > 1e-3
    for step in (1, 3, 4):
        assert largest_difference(weights(alone, step), weights(together, step)) <= 1e-5
    norms = gradient_norms(alone), gradient_norms(together)
    torch.testing.assert_close(*norms, rtol=1e-4, atol=0)


async def test_two_ranks_in_bfloat16_see_the_same_gradients(
    mongod: EmbeddedMongo, model_path: Path, tmp_path: Path
) -> None:
    """Weights are not compared: Adam's first steps are signs, and rounding flips small ones."""
    outputs = await train_alone_and_in_two(
        mongod, model_path, tmp_path, torch_dtype="bfloat16", learning_rate=0.0001
    )
    norms = [gradient_norms(output) for output in outputs]
    assert norms[0].shape == (4,)
    torch.testing.assert_close(*norms, rtol=0.05, atol=0)


async def test_a_loop_of_ones_own_on_two_ranks_trains_what_the_products_does(
    mongod: EmbeddedMongo, model_path: Path, tmp_path: Path
) -> None:
    scores = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]] * 2
    uris = [mongod.uri(f"ranks_{uuid.uuid4().hex[:8]}") for _ in range(2)]
    for uri in uris:
        await fill(uri, model_path, scores)
    flags = {"model_name_or_path": str(model_path), "db_connection_string": uris[1]}
    written = tmp_path / "loop.yaml"
    written.write_text(yaml.safe_dump(SETTINGS | flags | {"max_steps": 2}))
    folders = {"output_dir": tmp_path / "own", "logs_dir": tmp_path / "own/logs"}
    words = [f"--{name}={value}" for name, value in {"config": written, **folders}.items()]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", "2", "examples/own_algorithm/own_loop.py"),
            *(*words, f"--run_name={uris[1].partition('?')[0].rpartition('/')[2]}"),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    assert "step 2: reward" in ended.stdout
    start(uris[0], model_path, tmp_path / "product", num_ranks=1, max_steps=2)
    for step in (1, 2):
        both = (weights(tmp_path / name, step) for name in ("own", "product"))
        assert largest_difference(*both) <= 1e-5


@pytest.mark.parametrize(
    ("architecture", "flags", "four", "two"),
    [
        ("dense", {}, {"tp_size": 2}, {"cp_size": 2}),
        ("dense", {"lora_rank": 4, "async_save": "true"}, {"tp_size": 2}, {"cp_size": 2}),
        ("moe", {}, {"ep_size": 2, "tp_size": 2}, {"ep_size": 2, "cpu_offload": "true"}),
        ("dense", IN_CHUNKS, {"pp_size": 2}, {"cp_size": 2}),
        ("dense", {"lora_rank": 4}, {"pp_size": 2, "cp_size": 2}, {"pp_size": 2}),
        ("moe", {}, {"ep_size": 2, "tp_size": 2}, {"pp_size": 2, "max_tokens": 60}),
    ],
    ids=[
        "dense",
        "adapter-in-background",
        "moe",
        "stages-in-chunks",
        "stages-adapter",
        "stages-moe",
    ],
)
async def test_a_run_of_four_ranks_goes_on_with_two(
    mongod: EmbeddedMongo,
    model_path: Path,
    tmp_path: Path,
    architecture: str,
    flags: dict[str, Any],
    four: dict[str, Any],
    two: dict[str, Any],
) -> None:
    """The mesh changes, the weights do not, and no record is skipped or trained on twice."""
    if architecture == "moe":
        model_path = write_moe_model(tmp_path / "moe")
    scores = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]] * 4
    uris = [mongod.uri(f"ranks_{uuid.uuid4().hex[:8]}") for _ in range(2)]
    for uri in uris:
        await fill(uri, model_path, scores)
    alone, together = tmp_path / "alone", tmp_path / "together"
    start(uris[0], model_path, alone, num_ranks=1, max_steps=4, **flags)
    start(uris[1], model_path, together, num_ranks=4, max_steps=2, **four, **flags)
    start(uris[1], model_path, together, num_ranks=2, max_steps=4, **two, **flags)
    for step in (2, 4):
        assert largest_difference(weights(alone, step), weights(together, step)) <= 1e-5
    assert largest_difference(weights(alone, 4), weights(alone, 2)) > 1e-4
    for uri in uris:
        async with TrajectoryStore.connect(uri) as store:
            entries = [d["ledger"]["trainer"] async for d in store.database["record_data"].find({})]
        trained = sorted(entry["step"] for entry in entries if entry["status"] == "trained")
        assert trained == [1] * 6 + [2] * 6 + [3] * 6 + [4] * 6
        assert {entry["trained_count"] for entry in entries} == {1}


async def test_a_size_that_does_not_fit_ends_all_ranks(
    mongod: EmbeddedMongo, model_path: Path, tmp_path: Path
) -> None:
    uri = mongod.uri("ranks_misfit")
    await fill(uri, model_path, [[1.0, 0.0, 0.0]])
    with pytest.raises(AssertionError, match="--ep_size 2 needs a mixture-of-experts model"):
        start(uri, model_path, tmp_path, num_ranks=2, ep_size=2)


async def test_a_user_error_ends_all_ranks(
    mongod: EmbeddedMongo, model_path: Path, tmp_path: Path
) -> None:
    uri = mongod.uri("ranks_refused")
    with pytest.raises(AssertionError, match="no training tasks"):
        start(uri, model_path, tmp_path, num_ranks=2)


@pytest.mark.parametrize("num_stages", [1, 2])
async def test_two_ranks_fine_tune_as_one_process_does(
    model_path: Path, tmp_path: Path, num_stages: int
) -> None:
    talks = tmp_path / "talks.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": "x" * n}, {"role": "assistant", "content": "y"}]}
        for n in (1, 30, 2, 3, 4, 5, 6, 9)
    ]
    talks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for num_ranks, pp_size in ((1, 1), (2, num_stages)):
        start(
            "mongodb://127.0.0.1:1/unused",
            model_path,
            tmp_path / str(num_ranks),
            num_ranks=num_ranks,
            command="sft",
            train_file=talks,
            eval_file=talks,
            eval_strategy="ends",
            num_train_epochs=1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4 // (num_ranks // pp_size),
            pp_size=pp_size,
            max_tokens=48,
        )
    alone, together = tmp_path / "1", tmp_path / "2"
    assert largest_difference(weights(alone, 2), weights(together, 2)) <= 1e-5
    losses = [json.loads((o / "summary.json").read_text())["eval_loss"] for o in (alone, together)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0]["2"] < losses[0]["0"]
