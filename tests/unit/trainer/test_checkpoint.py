import asyncio
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.full_disk import full_disk
from support.patience import PATIENCE

from agentrl.config.sections import TrainerSection
from agentrl.distributed import Ranks, StateWriter, read_state
from agentrl.errors import ConfigError, WriteError
from agentrl.evaluation.eval_scores import EvalMetrics
from agentrl.runtime.atomic_directory import clear_leftovers
from agentrl.trainer.checkpoint import (
    CheckpointSaver,
    Draft,
    checkpoint_to_resume,
    checkpoints_root,
    latest_checkpoint,
)
from agentrl.trainer.metrics.history import History, StepMetrics
from agentrl.trainer.metrics.metrics_file import METRICS_FILE, append_eval_loss, append_metrics


def history_of(num_steps: int) -> History:
    steps = [
        StepMetrics(
            step=step,
            reward_mean=0.1 * step,
            num_groups=2,
            num_records=6,
            num_trained_records=4,
            loss=0.5,
            grad_norm=1.0,
            learning_rate=1e-3,
            staleness={0: 4, 1: 2},
            dropped={"stale": 2},
        )
        for step in range(1, num_steps + 1)
    ]
    return History(steps=steps, groups_consumed=2 * num_steps)


def write(output: Path, step: int, keep: int = 2, state: dict[str, Any] | None = None) -> None:
    model = output / "model"
    model.mkdir(parents=True, exist_ok=True)
    weights = model / "model.safetensors"
    weights.unlink(missing_ok=True)
    weights.write_text(f"weights {step}")
    append_metrics(output, history_of(step).steps[-1])
    draft = Draft.begin(output, step=step, model_dir=model, history=history_of(step))
    if state is not None:
        StateWriter(Ranks()).write(state, draft.state_path, in_background=False)
    draft.finish(keep=keep)


def test_the_newest_checkpoint_is_found_with_its_history(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    for step in (1, 2, 3):
        write(tmp_path, step, state={"momentum": torch.ones(2)})
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == found.history.last_step == 3
    assert found.history == history_of(3)
    assert (found.model_path / "model.safetensors").read_text() == "weights 3"
    state = {"momentum": torch.zeros(2)}
    read_state(state, found.state_path, Ranks())
    assert torch.equal(state["momentum"], torch.ones(2))


class _Command:
    """Runs a command when it is read back by an ordinary unpickler."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._mark}",)


def _with_description(state: Path, change: Callable[[Any], Any]) -> None:
    path = state / ".metadata"
    path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes()))))


def _with_place_outside(description: Any) -> Any:
    places = description.storage_data
    key = next(iter(places))
    places[key] = dataclasses.replace(places[key], relative_path="../../model/model.safetensors")
    return description


@pytest.mark.parametrize("way", ["description", "value", "type", "outside"])
def test_a_checkpoint_that_others_changed_runs_nothing(tmp_path: Path, way: str) -> None:
    mark = tmp_path / "mark"
    value: Any = _Command(mark) if way == "value" else {"last_epoch": 3, "names": ("a", 0.1)}
    write(tmp_path, 1, state={"momentum": torch.ones(2), "schedule": value})
    found = latest_checkpoint(tmp_path)
    assert found is not None
    mark.unlink(missing_ok=True)
    change: dict[str, Callable[[Any], Any]] = {
        "description": lambda _: _Command(mark),
        "type": lambda _: ["no description"],
        "outside": _with_place_outside,
    }
    if way in change:
        _with_description(found.state_path, change[way])
    state = {"momentum": torch.zeros(2), "schedule": {"last_epoch": 0, "names": ("", 0.0)}}
    if way == "value":
        state["schedule"] = 0
    with pytest.raises(ConfigError, match="is not a checkpoint of AgentRL") as caught:
        read_state(state, found.state_path, Ranks())
    assert not mark.exists()
    assert "\n" not in str(caught.value)


WRITER = """
import sys
from pathlib import Path
import torch
from agentrl.distributed import Ranks, StateWriter
from agentrl.trainer.checkpoint import Draft
from agentrl.trainer.metrics.history import History
output, in_background = Path(sys.argv[1]), sys.argv[2] == "background"
writer = StateWriter(Ranks())
for step in range(1, 10_000):
    draft = Draft.begin(output, step=step, model_dir=output / "model", history=History())
    state = {f"part{i}": torch.full((1 << 20,), float(step)) for i in range(8)}
    writer.write(state, draft.state_path, in_background=in_background)
    writer.wait()
    draft.finish(keep=2)
"""


@pytest.mark.parametrize("way", [pytest.param("foreground", marks=pytest.mark.slow), "background"])
def test_a_writer_killed_in_the_middle_leaves_the_checkpoint_before(
    tmp_path: Path, way: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_text("weights")
    root = checkpoints_root(tmp_path)
    with (tmp_path / "log").open("wb") as log:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), way], stdout=log, stderr=log
        )
    deadline = time.monotonic() + PATIENCE
    try:
        # Some checkpoints are whole, and another one is half written.
        while not (latest := sorted(root.glob("0*"))[-1:]) or not list(root.glob(".*/state/*")):
            assert writer.poll() is None, (tmp_path / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "no checkpoint in time"
    finally:
        writer.kill()
        writer.wait(10)
    clear_leftovers(root)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step >= int(latest[0].name)
    state = {f"part{i}": torch.zeros(1 << 20) for i in range(8)}
    read_state(state, found.state_path, Ranks())
    assert {float(value) for part in state.values() for value in part.unique()} == {found.step}


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(
    tmp_path: Path, in_background: bool
) -> None:
    write(tmp_path, 1, state={"momentum": torch.ones(2)})
    draft = Draft.begin(tmp_path, step=2, model_dir=tmp_path / "model", history=history_of(2))
    writer = StateWriter(Ranks())
    state = {"momentum": torch.ones(1 << 20)}

    def save() -> None:
        writer.write(state, draft.state_path, in_background=in_background)
        writer.wait()

    with full_disk(100_000), pytest.raises(WriteError, match=r"rank 0 cannot write .*/state: "):
        save()
    with full_disk(10), pytest.raises(WriteError, match=r"cannot write .*000002: "):
        draft.finish(keep=2)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1


class LateGroup:
    """A group of ranks without state that have written it when told so."""

    def __init__(self) -> None:
        self.written = asyncio.Event()

    async def save_state(self, directory: Path, *, in_background: bool) -> None:
        assert in_background

    async def wait_saved(self) -> None:
        await self.written.wait()


async def test_a_checkpoint_is_complete_once_its_ranks_have_written(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    group, saved = LateGroup(), asyncio.Queue[int]()
    trainer = TrainerSection(async_save=True)
    saver = CheckpointSaver(
        tmp_path, group=group, trainer=trainer, saved_step=0, on_saved=saved.put
    )
    await saver.save(tmp_path / "model", history_of(1))
    await asyncio.sleep(0.1)
    assert (saver.saved_step, saved.qsize(), latest_checkpoint(tmp_path)) == (0, 0, None)
    group.written.set()
    await saver.settle()
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert (saver.saved_step, saved.get_nowait(), found.step) == (1, 1, 1)


def test_only_so_many_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        write(tmp_path, step)
    names = sorted(path.name for path in checkpoints_root(tmp_path).iterdir())
    assert names == ["000006", "000009"]


def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (checkpoints_root(tmp_path) / "000002" / "model").mkdir(parents=True)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1


def _flip(path: Path, *, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.unlink()  # its content may be hard-linked to a published policy
    path.write_bytes(content)


def _files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def test_a_flipped_bit_in_any_file_falls_back_to_the_checkpoint_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        write(tmp_path, step, state={"momentum": torch.ones(2)})
    newest = checkpoints_root(tmp_path) / "000002"
    assert len(_files(newest)) == 5
    for path in _files(newest):
        size = path.stat().st_size
        for bit in (0, 8 * (size // 2) + 3, 8 * size - 1):
            _flip(path, bit=bit)
            caplog.clear()
            found = latest_checkpoint(tmp_path)
            assert found is not None
            assert found.step == 1, (path, bit)
            assert f"checkpoint {newest} is damaged" in caplog.text
            assert len(caplog.records) == 1
            _flip(path, bit=bit)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("name", ["state.json", "digests.json", "model/model.safetensors"])
@pytest.mark.parametrize("size", [0, 7, None])
def test_a_truncated_or_lost_file_falls_back_to_the_checkpoint_before(
    tmp_path: Path, name: str, size: int | None
) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    path = checkpoints_root(tmp_path) / "000002" / name
    content = path.read_bytes()
    path.unlink()
    if size is not None:
        path.write_bytes(content[:size])
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1


def test_what_is_damaged_is_kept_beside_the_resumed_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, keep=3)
    root = checkpoints_root(tmp_path)
    for name in ("000002", "000003"):
        _flip(root / name / "model/model.safetensors", bit=5)
    found = checkpoint_to_resume(tmp_path)
    assert found is not None
    assert found.step == 1
    assert f"resuming from {found.path}; the damaged {root}/000002.damaged is kept" in caplog.text
    for step in (2, 3, 4):
        write(tmp_path, step)
    assert sorted(path.name for path in root.iterdir()) == [
        "000002.damaged",
        "000003",
        "000003.damaged",
        "000004",
    ]
    found = checkpoint_to_resume(tmp_path)
    assert found is not None
    assert found.step == 4


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(tmp_path: Path) -> None:
    write(tmp_path, 1)
    _flip(checkpoints_root(tmp_path) / "000001/model/model.safetensors", bit=0)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"all checkpoints in .* are damaged"):
            checkpoint_to_resume(tmp_path)


def test_a_checkpoint_does_not_grow_with_the_run(tmp_path: Path) -> None:
    sizes = []
    for step in range(1, 60):
        write(tmp_path, step)
        path = checkpoints_root(tmp_path) / f"{step:06d}/state.json"
        sizes.append(path.stat().st_size)
    assert max(sizes) < 1.05 * min(sizes)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.history == history_of(59)


def test_losses_on_held_out_conversations_stay_out_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    history = history_of(1)
    sizes = []
    for step in range(1, 60):
        history.steps = history_of(step).steps[-1:]
        history.eval_losses[step] = 1.0 / step
        append_eval_loss(tmp_path, step, history.eval_losses[step])
        draft = Draft.begin(tmp_path, step=step, model_dir=tmp_path / "model", history=history)
        path = draft.finish(keep=3)
        sizes.append((path / "state.json").stat().st_size)
    assert max(sizes) < 1.05 * min(sizes)
    found = latest_checkpoint(tmp_path, at_most=58)
    assert found is not None
    assert found.history.eval_losses == {step: 1.0 / step for step in range(1, 59)}


def test_a_skipped_step_without_rewards_stays_in_the_history(tmp_path: Path) -> None:
    skipped = (
        history_of(1)
        .steps[0]
        .model_copy(
            update={"reward_mean": None, "loss": None, "grad_norm": None, "skipped": "not finite"}
        )
    )
    history = History(steps=[skipped, history_of(2).steps[-1]])
    for metrics in history.steps:
        append_metrics(tmp_path, metrics)
    (tmp_path / "model").mkdir()
    Draft.begin(tmp_path, step=2, model_dir=tmp_path / "model", history=history).finish(keep=1)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.history == history


def test_lost_figures_leave_a_gap_and_no_other_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    metrics = tmp_path / METRICS_FILE
    metrics.write_bytes(b"{torn\n" + metrics.read_bytes().split(b"\n", 1)[1])
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert [step.step for step in found.history.steps] == [2, 3]
    assert "lacks the figures of 1 of 2 steps" in caplog.text


def test_a_checkpoint_of_the_format_before_is_resumed(tmp_path: Path) -> None:
    write(tmp_path, 2)
    path = checkpoints_root(tmp_path) / "000002"
    (path / "digests.json").unlink()
    state = {"format": 2, "step": 2, "history": history_of(2).model_dump(mode="json")}
    (path / "state.json").write_text(json.dumps(state))
    found = checkpoint_to_resume(tmp_path)
    assert found is not None
    assert found.history == history_of(2)


@pytest.mark.parametrize("share", [0, 0.5])
def test_state_that_cannot_be_read_is_one_line(tmp_path: Path, share: float) -> None:
    write(tmp_path, 1, state={"momentum": torch.ones(2)})
    state_path = checkpoints_root(tmp_path) / "000001/state"
    for path in _files(state_path):
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(ConfigError, match=r"cannot be read|is not a checkpoint") as caught:
            read_state({"momentum": torch.zeros(2)}, state_path, Ranks())
        assert "\n" not in str(caught.value)
        path.write_bytes(content)


def test_a_checkpoint_without_optimizer_cannot_be_resumed(tmp_path: Path) -> None:
    write(tmp_path, 1, state=None)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    with pytest.raises(ConfigError, match="save_only_model"):
        _ = found.state_path


def test_history_sums_up_what_its_steps_did() -> None:
    history = history_of(3)
    history.add_tail({"stale": 1, "zero_variance": 3})
    history.evals.append(EvalMetrics(version=0, reward_mean=0.25, num_tasks=4))
    assert history.staleness() == {0: 12, 1: 6}
    assert history.dropped() == {"stale": 7, "zero_variance": 3}
    assert history.eval_at(0) is not None
    assert history.eval_at(3) is None
