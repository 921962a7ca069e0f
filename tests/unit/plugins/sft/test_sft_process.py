"""Fine-tuning on conversations: the plain loss, whole runs, resume, and where data come from."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.tiny_vision import picture, vision_checkpoint
from harness.trees import NO_AUTOCAST, flat_gradient, relative_error
from safetensors.torch import load_file
from support.training import MakeConfig, Player, train_tasks
from transformers import AutoModelForCausalLM

from agentrl.cli.main import main
from agentrl.config.sections import RootConfig
from agentrl.distributed import Ranks
from agentrl.errors import ConfigError
from agentrl.models.load import load_policy
from agentrl.models.unrounded import unrounded
from agentrl.plugins.sft.curriculum import Curriculum, file_examples, sft_batch
from agentrl.plugins.sft.learned import suspicions
from agentrl.plugins.sft.sft_process import SftResult, lead_sft, with_fine_tuning_defaults
from agentrl.renderers import Renderer
from agentrl.store import TrajectoryStore
from agentrl.trainer.learner.passes import forward_backward
from agentrl.trainer.rl.training_loop import lead

torch.set_num_threads(1)


def talk(number: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": "count"},
            {"role": "user", "content": f"after {number}?"},
            {"role": "assistant", "content": f"{number + 1}"},
            {"role": "user", "content": "and then?"},
            {"role": "assistant", "content": f"it is {number + 2}"},
        ]
    }


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(talk(number)) + "\n" for number in range(6)))
    return path


@pytest.fixture
def make_sft(make_config: MakeConfig, talks: Path) -> MakeConfig:
    def make(**flags: Any) -> RootConfig:
        values: dict[str, Any] = {
            "run_name": "tuned",
            "train_file": talks,
            "per_device_train_batch_size": 2,
            "num_train_epochs": 2,
            "max_steps": None,
            **flags,
        }
        return make_config(**values)

    return make


async def tune(config: RootConfig, **arguments: Any) -> SftResult:
    return await lead_sft(config, Ranks(), stop=asyncio.Event(), **arguments)


@pytest.mark.parametrize("token_budget", [10_000, 60, 20])
def test_loss_and_gradient_are_those_of_plain_rows_in_float64(
    model_path: Path, talks: Path, token_budget: int
) -> None:
    examples = file_examples(talks, Renderer.load(model_path))
    batch = sft_batch(examples, token_budget=token_budget, num_ranks=2)
    assert batch.stats.tokens_packed <= batch.stats.tokens_flat
    policy = load_policy(model_path, dtype=torch.float64)
    loss = sum(
        forward_backward(policy, one, None, chunk_size=7, autocast=NO_AUTOCAST).loss
        for share in batch.micro_batches
        for one in share
    )
    gradient = flat_gradient(policy)

    plain = load_policy(model_path, dtype=torch.float64, attention=None).model
    total, count = torch.zeros((), dtype=torch.float64), 0
    for example in examples:  # one row a conversation, -100 wherever the assistant did not speak
        ids = torch.from_numpy(example.turns[-1].full_ids.astype("int64"))[None]
        labels = torch.full_like(ids, -100)
        for turn in example.turns:
            places = slice(turn.num_prompt_tokens, len(turn.full_ids))
            labels[0, places] = ids[0, places]
        with unrounded(torch.float64):
            logits = plain(ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(
            logits, labels[0, 1:], ignore_index=-100, reduction="sum"
        )
        count += int((labels != -100).sum())
    (total / count).backward()
    expected = flat_gradient(plain)
    assert loss == pytest.approx((total / count).item(), rel=1e-12)
    assert relative_error(gradient, expected) <= 1e-12


async def test_a_run_learns_reports_and_exports(
    make_sft: MakeConfig, talks: Path, model_path: Path
) -> None:
    config = make_sft(eval_file=talks, eval_strategy="steps", eval_steps=3, save_steps=4)
    result = await tune(config)
    assert (result.status, result.step) == ("completed", 6)
    summary = json.loads(result.summary_path.read_text())
    assert summary["epochs"] == 2.0
    assert len(summary["loss"]) == 6
    assert list(summary["eval_loss"]) == ["0", "3", "6"]
    assert summary["eval_loss"]["6"] < summary["eval_loss"]["3"] < summary["eval_loss"]["0"]
    lines = [
        json.loads(x) for x in (result.model_path.parent / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["merge_tokens"] > 1 and line["tokens_per_second"] > 0 for line in lines)
    assert "ratio_mean" not in lines[0]
    loaded = AutoModelForCausalLM.from_pretrained(result.model_path)
    examples = file_examples(talks, Renderer.load(result.model_path))
    nll = []
    with torch.no_grad():
        for turn in (turn for example in examples for turn in example.turns):
            ids = torch.from_numpy(turn.full_ids.astype("int64"))[None]
            logprobs = loaded(ids).logits[0, :-1].log_softmax(-1)
            chosen = logprobs.gather(1, ids[0, 1:, None])[turn.num_prompt_tokens - 1 :]
            nll.append(-chosen.flatten())
    assert torch.cat(nll).mean().item() == pytest.approx(summary["eval_loss"]["6"], rel=1e-4)


async def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(
    make_sft: MakeConfig, tmp_path: Path
) -> None:
    whole = await tune(make_sft(output_dir=tmp_path / "whole"))
    await tune(make_sft(max_steps=2))
    resumed = await tune(make_sft())
    assert resumed.step == whole.step == 6
    first, second = (load_file(r.model_path / "model.safetensors") for r in (whole, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)
    losses = [json.loads(r.summary_path.read_text())["loss"] for r in (whole, resumed)]
    assert losses[0] == losses[1]
    again = await tune(make_sft())
    assert (again.status, again.step) == ("completed", 6)
    with pytest.raises(ConfigError, match="is already at step 6, and these data and flags have 5;"):
        await tune(make_sft(max_steps=5))


async def test_a_fresh_run_starts_over_or_refuses(make_sft: MakeConfig) -> None:
    first = await tune(make_sft(fresh=True, max_steps=2))
    with pytest.raises(ConfigError, match=r"--fresh: there are files in .*; choose another"):
        await tune(make_sft(fresh=True, max_steps=1))
    again = await tune(make_sft(fresh=True, delete_existing=True, max_steps=1))
    assert (first.step, again.step) == (2, 1)
    assert [path.name for path in (again.model_path.parent / "checkpoints").iterdir()] == ["000001"]


async def test_records_of_a_run_are_learnt_by_their_score(
    make_sft: MakeConfig, store: TrajectoryStore, mongo_uri: str, model_path: Path
) -> None:
    await store.tasks.add(train_tasks(2, 3))
    await Player(model_path).play_groups(store, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    name = mongo_uri.partition("?")[0].rpartition("/")[2]
    flags = {"train_file": None, "records_of": name, "num_train_epochs": 1}
    result = await tune(make_sft(**flags), records_uri=mongo_uri)
    summary = json.loads(result.summary_path.read_text())
    assert (summary["conversations"], result.step) == (3, 2)
    assert summary["tokens"]["trained"] == 3 * 2 * 4
    with pytest.raises(ConfigError, match="no training record with a score of at least 2"):
        await tune(make_sft(**flags, min_score=2, output_dir="never"), records_uri=mongo_uri)
    await store.database["records"].update_many({}, {"$set": {"split": "eval"}})
    with pytest.raises(ConfigError, match="no scored training record; name another run"):
        await tune(make_sft(**flags, output_dir="never"), records_uri=mongo_uri)


async def test_what_cannot_be_learnt_from_is_said_before_anything_starts(
    make_sft: MakeConfig, tmp_path: Path, model_path: Path
) -> None:
    with pytest.raises(ConfigError, match="either --train_file FILE or --records_of"):
        await tune(make_sft(train_file=None))
    bad = tmp_path / "bad.jsonl"
    reply = talk(1)["messages"][2]
    bad.write_text(json.dumps({"messages": [{"role": "oracle", "content": "x"}, reply]}))
    with pytest.raises(ConfigError, match=r"line 1: messages\[0\]: unknown message role 'oracle'"):
        await tune(make_sft(train_file=bad))
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"messages": [{"role": "user", "content": "ab" * 300}, reply]}))
    with pytest.raises(ConfigError, match=r"long.jsonl: line1: \d+ tokens, .* has 256 positions"):
        await tune(make_sft(eval_file=long))
    model = Path(shutil.copytree(model_path, tmp_path / "smaller"))
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**values, "vocab_size": 40}))
    with pytest.raises(ConfigError, match=r"line1: a token has id \d+, .* vocab_size is 40;"):
        await tune(make_sft(model_name_or_path=model))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match="the file has no conversations"):
        await tune(make_sft(train_file=empty))
    assert not (tmp_path / "output").exists()


async def test_a_reinforcement_learning_run_is_not_taken_for_ones_own(
    make_config: MakeConfig, make_sft: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await store.tasks.add(train_tasks(2, 3))
    await Player(model_path).play_groups(store, [[1.0, 0.0, 0.0]] * 2)
    await lead(make_config(max_steps=1), Ranks(), stop=asyncio.Event())
    with pytest.raises(ConfigError, match="belongs to a reinforcement-learning run"):
        await tune(make_sft())


def test_every_example_comes_once_an_epoch_and_the_order_is_drawn() -> None:
    plan = Curriculum(num_examples=5, examples_per_step=2, num_epochs=2, max_steps=None, seed=1)
    steps = [plan.members(step) for step in range(1, plan.num_steps + 1)]
    assert [len(members) for members in steps] == [2, 2, 2, 2, 2]
    order = [index for members in steps for index in members]
    assert sorted(order[:5]) == sorted(order[5:]) == [0, 1, 2, 3, 4]
    assert order[:5] != order[5:]
    odd = Curriculum(num_examples=5, examples_per_step=2, num_epochs=1, max_steps=None, seed=None)
    assert [odd.members(step) for step in (1, 2, 3)] == [[0, 1], [2, 3], [4]]
    assert [odd.num_epochs_after(step) for step in (1, 3)] == [0.4, 1]
    assert Curriculum(5, 2, 1, 2, None).num_steps == 2


def test_a_given_number_of_steps_wins_over_epochs() -> None:
    plan = Curriculum(num_examples=5, examples_per_step=2, num_epochs=1, max_steps=9, seed=None)
    assert (plan.num_steps, plan.num_epochs_after(9)) == (9, 3.6)
    order = [index for step in range(1, 10) for index in plan.members(step)]
    assert order == [*range(5)] * 3 + [0, 1, 2]


def test_the_command_refuses_a_file_as_output_directory(
    talks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--train_file", str(talks), "--output_dir", str(talks), "--run_name", "typed"]
    assert main(["sft", *words]) == 2
    assert "talks.jsonl is a file; choose another folder" in capsys.readouterr().err


def test_the_command_says_where_the_model_is(
    talks: Path, model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {
        "run_name": "typed",
        "train_file": talks,
        "model_name_or_path": model_path,
        "output_dir": tmp_path / "typed",
        "per_device_train_batch_size": 6,
        "num_train_epochs": 1,
        "torch_dtype": "float32",
    }
    argv = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    assert main(["sft", *argv]) == 0
    assert f"completed after step 1; the model is in {tmp_path / 'typed/model'}" in (
        capsys.readouterr().out
    )
    assert main(["sft", "--run_name", "typed2"]) == 2
    assert "either --train_file FILE or --records_of" in capsys.readouterr().err


def seen(name: str, said: str) -> str:
    question = [{"type": "image", "image": name}, {"type": "text", "text": "color?"}]
    talk = [{"role": "user", "content": question}, {"role": "assistant", "content": said}]
    return f"{json.dumps({'messages': talk})}\n"


@pytest.mark.slow
async def test_answers_that_only_images_tell_apart_are_learned(
    make_sft: MakeConfig, tmp_path: Path
) -> None:
    model = vision_checkpoint(tmp_path / "seeing", "qwen3_vl")
    (tmp_path / "a.png").write_bytes(picture(1))
    (tmp_path / "b.png").write_bytes(picture(2))
    talks = tmp_path / "seen.jsonl"
    talks.write_text(seen("a.png", "red") + seen("b.png", "blue"))
    config = make_sft(
        train_file=talks,
        model_name_or_path=model,
        num_train_epochs=40,
        learning_rate=3e-3,
        train_vision=True,
    )
    result = await tune(config)
    losses = json.loads(result.summary_path.read_text())["loss"]
    # Whoever does not see has a loss of log 2 for one token of each answer.
    assert losses[-1] < 0.05 < losses[0]
    exported, start = (load_file(path / "model.safetensors") for path in (result.model_path, model))
    assert exported.keys() == start.keys()
    assert not torch.equal(
        *(part["model.visual.patch_embed.proj.weight"] for part in (exported, start))
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none.png", "line 1: image 'none.png': No such file"),
        ("seen.jsonl", "not PNG, JPEG, GIF, WebP or BMP"),
        ("https://a.example/b.png", "conversations must refer to image files, not URLs"),
    ],
)
async def test_a_conversation_whose_image_is_none_is_named(
    name: str, reason: str, make_sft: MakeConfig, tmp_path: Path
) -> None:
    talks = tmp_path / "seen.jsonl"
    talks.write_text(seen(name, "red"))
    with pytest.raises(ConfigError, match=reason):
        await tune(make_sft(train_file=talks))


async def test_more_steps_than_the_epochs_have_are_taken(make_sft: MakeConfig) -> None:
    result = await tune(make_sft(max_steps=7, num_train_epochs=1))
    summary = json.loads(result.summary_path.read_text())
    assert (result.step, summary["epochs"]) == (7, 14 / 6)


async def test_defaults_are_those_of_fine_tuning(
    make_sft: MakeConfig, talks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "agentrl")
    unset = ("per_device_train_batch_size", "num_train_epochs", "learning_rate")
    config = make_sft(**dict.fromkeys(unset), eval_file=talks)
    result = await tune(config)
    summary = json.loads(result.summary_path.read_text())
    assert (result.step, summary["epochs"]) == (3, 3)  # 6 conversations, 8 per step
    # Held-out conversations are used although nothing says when.
    assert list(summary["eval_loss"]) == ["0", "3"]
    assert "6 conversations with 12 replies to learn: 0 tool calls, " in caplog.text
    assert "after step 3, line1: the model answers " in caplog.text
    assert "the conversation has '1<|im_end|>'" in caplog.text
    assert "3 steps of 8 conversations (3 epochs), learning rate 2e-05" in caplog.text
    adapter = with_fine_tuning_defaults(make_sft(learning_rate=None, lora_rank=4))
    assert adapter.trainer.learning_rate == 2e-4
    assert with_fine_tuning_defaults(make_sft()).trainer.learning_rate == 0.001


@pytest.mark.parametrize(
    ("reply", "warning"),
    [
        ("", "1 of 1 replies are empty: the model learns to end its turn without a word"),
        ("hello", "1 conversations describe tools and none calls one"),
        ("<tool_call>\n{oops", "1 of 1 replies hold a tool call that cannot be parsed"),
    ],
)
def test_suspicious_conversations_are_named(
    reply: str, warning: str, tmp_path: Path, model_path: Path
) -> None:
    path = tmp_path / "odd.jsonl"
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": reply}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    path.write_text(json.dumps({"messages": messages, "tools": tools}))
    (example,) = file_examples(path, Renderer.load(model_path))
    assert any(one.startswith(warning) for one in suspicions([example.lesson]))


async def test_the_precision_of_the_checkpoint_is_kept_unless_another_is_asked_for(
    make_sft: MakeConfig, model_path: Path, tmp_path: Path
) -> None:
    start = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    half = Path(shutil.copytree(model_path, tmp_path / "half"))
    start.save_pretrained(half)
    flags = {"model_name_or_path": half, "torch_dtype": None}
    whole = await tune(make_sft(**flags, output_dir=tmp_path / "whole"))
    await tune(make_sft(**flags, max_steps=2))
    resumed = await tune(make_sft(**flags))
    first, second = (load_file(r.model_path / "model.safetensors") for r in (whole, resumed))
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
    assert json.loads((whole.model_path / "config.json").read_text())["dtype"] == "bfloat16"
    # Steps accumulate in float32, so resuming loses nothing.
    assert all(torch.equal(first[name], second[name]) for name in first)
    asked = await tune(
        make_sft(model_name_or_path=half, torch_dtype="float32", output_dir=tmp_path / "asked")
    )
    exported = load_file(asked.model_path / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
