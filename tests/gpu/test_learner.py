"""The learner on a GPU: a step's result does not depend on how memory is saved, nor on restarts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import write_model, write_moe_model

from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.distributed import Ranks
from agentrl.plugins.planner.rehearsal import filled_row
from agentrl.trainer.learner.learner import Learner, StepOutcome
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights

pytestmark = pytest.mark.gpu
NUM_TOKENS = 200
WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {"gradient_checkpointing": True},
    "offloaded": {"activation_offloading": True},
    "head in chunks": {"loss_seq_chunk_size": 16},
    "determined": {"full_determinism": True},
}


def learner(path: Path, dtype: str, model: dict[str, Any] | None = None, **flags: Any) -> Learner:
    flags = {"learning_rate": 1e-3, **flags}
    settings = LearnerSettings(
        weights=StartWeights(path),
        model=ModelSection.model_validate(
            {"model_name_or_path": str(path), "torch_dtype": dtype, **(model or {})}
        ),
        trainer=TrainerSection.model_validate(flags),
        algorithm=AlgorithmSection(),
        seed=0,
    )
    return Learner(settings, Ranks())


def steps(learner: Learner, count: int, num_chunks: int = 1) -> list[StepOutcome]:
    batch = filled_row(NUM_TOKENS, NUM_TOKENS, num_chunks=num_chunks)
    outcomes = []
    for number in range(count):
        learner.forward_backward([batch, batch])
        outcomes.append(learner.optim_step(number))
    return outcomes


def figures(outcomes: list[StepOutcome]) -> list[float]:
    return [figure for one in outcomes for figure in (one.loss, one.grad_norm)]


@pytest.fixture(autouse=True)
def as_before() -> Any:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_step_is_the_same_however_memory_is_saved(
    tmp_path: Path, way: str, num_chunks: int
) -> None:
    path = write_model(tmp_path)
    expected = figures(steps(learner(path, "float32"), 2))
    found = figures(steps(learner(path, "float32", **WAYS[way]), 2, num_chunks))
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("write", [write_model, write_moe_model])
def test_a_determined_run_repeats_itself_and_resumes_bit_for_bit(
    tmp_path: Path, write: Any
) -> None:
    path = write(tmp_path / "start")
    whole = learner(path, "bfloat16", full_determinism=True)
    expected = figures(steps(whole, 4))
    begun = learner(path, "bfloat16", full_determinism=True)
    assert figures(steps(begun, 2)) == expected[:4]
    begun.export(tmp_path / "exported")
    begun.save_state(tmp_path / "state", in_background=False)
    begun.wait_saved()
    resumed = learner(tmp_path / "exported", "bfloat16", full_determinism=True)
    resumed.load_state(tmp_path / "state")
    assert figures(steps(resumed, 2)) == expected[4:]
    ends = [one.full_state() for one in (whole, resumed)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_an_adapter_learns_and_its_base_stays(tmp_path: Path) -> None:
    path = write_model(tmp_path / "start")
    trained = learner(path, "bfloat16", {"lora_rank": 4})
    before = {name: tensor.clone() for name, tensor in trained.full_state().items()}
    found = steps(trained, 3)
    assert found[-1].loss != found[0].loss
    trained.export(tmp_path / "exported")
    assert (tmp_path / "exported" / "adapter_model.safetensors").is_file()
    after = trained.full_state()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("lora" in name for name in changed)
