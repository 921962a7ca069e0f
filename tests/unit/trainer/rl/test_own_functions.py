"""Runs whose loss, advantages, filter, rates and callback are the user's."""

import asyncio
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.training import MakeConfig, Player, teach, train_tasks

from agentrl.algorithms.formula_registry import users_function
from agentrl.config.loading import flat_values
from agentrl.config.own_function import SOURCES
from agentrl.config.sections import RootConfig
from agentrl.distributed import Ranks
from agentrl.errors import UserCodeError
from agentrl.store import TrajectoryStore
from agentrl.trainer.checkpoint import latest_checkpoint
from agentrl.trainer.metrics.history import StepMetrics
from agentrl.trainer.rl.replay import _note_changed_sources
from agentrl.trainer.rl.training_loop import lead

EXAMPLES = Path(__file__).parents[4] / "examples" / "own_algorithm"
REFERENCES = {
    "sapo": ("loss_calculator", "sapo"),
    "mixed_advantage": ("advantage_estimator", "mixed"),
    "difficulty_filter": ("group_filter", "neither_easy_nor_hard"),
    "distillation": ("loss_calculator", "distilled"),
    "best_of_n": ("loss_calculator", "likelihood"),
}
MIXED = [1.0, 0.0, 0.0]
EASY = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]


async def train(config: RootConfig) -> list[StepMetrics]:
    await lead(config, Ranks(), stop=asyncio.Event())
    lines = (config.run.output_path / "metrics.jsonl").read_text().splitlines()
    return [StepMetrics.model_validate_json(line) for line in lines if '"step"' in line]


async def fill(store: TrajectoryStore, model_path: Path, scores: list[list[float]]) -> None:
    await store.tasks.add(train_tasks(len(scores), len(scores[0])))
    await Player(model_path).play_groups(store, scores)


def weights(config: RootConfig) -> dict[str, torch.Tensor]:
    checkpoint = latest_checkpoint(config.run.output_path)
    assert checkpoint is not None
    loaded: dict[str, torch.Tensor] = load_file(checkpoint.model_path / "model.safetensors")
    return loaded


async def test_a_users_copy_of_grpo_trains_the_same_weights(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import torch\n"
        "from agentrl.algorithms.losses import TargetLosses, inside_drop_range\n"
        "def grpo(inputs, upper):\n"
        "    ratio = (inputs.policy_logprobs - inputs.proximal).clamp(-20.0, 20.0).exp()\n"
        "    plain = ratio * inputs.advantages\n"
        "    bounded = ratio.clamp(0.8, upper) * inputs.advantages\n"
        "    loss = -torch.minimum(plain, bounded)\n"
        "    kept = inside_drop_range(inputs)\n"
        "    clipped = bounded.detach() < plain.detach()\n"
        "    losses = TargetLosses(loss, kept, inputs.behavior_ratio, clipped)\n"
        "    return losses, {'ratio_squared': inputs.behavior_ratio ** 2}\n"
        "def rate(step):\n"
        "    return 1e-3\n"
        "def after(done):\n"
        "    with open(__file__ + '.log', 'a') as log:\n"
        "        log.write(f'{done.step} {done.policy_version} {done.metrics[\"loss\"]}\\n')\n"
    )
    await fill(store, model_path, [MIXED] * 4)
    own = make_config(
        loss_calculator=f"{path}:grpo",
        loss_args='{"upper": 1.3}',
        lr_scheduler_type=f"{path}:rate",
        on_step=f"{path}:after",
    )
    found = await train(own)
    built_in = make_config(consumer="other", output_dir=str(tmp_path / "built_in"))
    expected = await train(built_in)
    assert [step.loss for step in found] == [step.loss for step in expected]
    assert [step.grad_norm for step in found] == [step.grad_norm for step in expected]
    for name, value in weights(built_in).items():
        assert torch.equal(weights(own)[name], value), name
    for step in found:
        assert step.loss_metrics["ratio_squared"] == pytest.approx(1.0, abs=0.5)
    log = Path(f"{path}.log").read_text().split()
    assert [float(word) for word in log] == [
        *(1.0, 1.0, found[0].loss),
        *(2.0, 2.0, found[1].loss),
    ]
    run = await store.runs.get()
    assert run is not None
    assert run.config[SOURCES].keys() == {"loss_calculator", "lr_scheduler_type", "on_step"}


async def test_a_function_that_raises_after_a_step_ends_the_run_with_its_place(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "own.py"
    path.write_text("def after(done):\n    assert done.step < 2, 'enough'\n")
    await fill(store, model_path, [MIXED] * 4)
    with pytest.raises(UserCodeError, match=r"^--on_step .*own.py:2: AssertionError: enough$"):
        await train(make_config(on_step=f"{path}:after"))


async def test_a_function_that_exits_the_program_ends_the_run_as_one_that_raises(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "own.py"
    path.write_text("import sys\n\n\ndef after(done):\n    sys.exit(0)\n")
    await fill(store, model_path, [MIXED] * 4)
    with pytest.raises(UserCodeError, match=r"^--on_step .*own.py:5: SystemExit: 0 \(it exits"):
        await train(make_config(on_step=f"{path}:after"))


def test_a_changed_source_is_named_by_replay(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "own.py"
    path.write_text("def rate(step):\n    return 1e-5\n")
    config = make_config(lr_scheduler_type=f"{path}:rate")
    recorded: dict[str, Any] = flat_values(config) | {SOURCES: {"lr_scheduler_type": "0" * 64}}
    with caplog.at_level(logging.WARNING):
        _note_changed_sources(config, recorded)
    assert f"the source of --lr_scheduler_type {path}:rate has changed" in caplog.text


@pytest.mark.parametrize("example", REFERENCES)
async def test_examples_train(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path, example: str
) -> None:
    path = EXAMPLES / f"{example}.py"
    flag, name = REFERENCES[example]
    await fill(store, model_path, [EASY, [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]])
    options = {"num_generations": 6, "max_steps": 1, "groups_per_step": 2, "sign_clip": "false"}
    if example == "distillation":
        options["teachers"] = "big"
        await teach(store, "big", [1.0])
    if example == "best_of_n":
        options["advantage_estimator"] = f"{path}:best"
    (step,) = await train(make_config(**{flag: f"{path}:{name}"}, **options))
    assert step.loss is not None
    assert math.isfinite(step.loss)
    assert (step.grad_norm or 0.0) > 0.0
    if flag == "group_filter":
        assert step.dropped == {"group_filter": 6}
    if example == "sapo":
        assert 0.9 < step.loss_metrics["gradient_share"] <= 1.0
    if example == "best_of_n":
        assert step.num_trained_records == 2  # the first right one of each question
    if example == "distillation":
        # The teacher finds every token a nat likelier than the sampler did.
        assert step.loss_metrics["reverse_kl"] == pytest.approx(-1.0, abs=1e-3)


def test_every_example_is_tested_and_fits_on_a_page() -> None:
    files = list(EXAMPLES.glob("*.py"))
    in_other_tests = {"own_loop", "built_in_losses"}
    assert {path.stem for path in files} == REFERENCES.keys() | in_other_tests
    assert all(len(path.read_text().splitlines()) <= 60 for path in files)


async def test_own_metrics_are_in_the_stored_figures(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    await fill(store, model_path, [MIXED] * 2)
    sapo = f"{EXAMPLES / 'sapo.py'}:sapo"
    config = make_config(loss_calculator=sapo, max_steps=1)
    await train(config)
    line = (config.run.output_path / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(line)["loss_metrics"].keys() == {"gradient_share"}


def test_a_loss_that_is_called_otherwise_names_the_flag_of_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def needs(inputs, *, beta):\n    return inputs\n")
    loss = users_function(f"{tmp_path}/own.py:needs", "--loss_calculator")
    with pytest.raises(
        UserCodeError, match=r"needs: TypeError: .* 'beta'; .* what --loss_args holds"
    ):
        loss(None)
