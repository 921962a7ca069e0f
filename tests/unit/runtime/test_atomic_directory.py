import os
from pathlib import Path

import pytest

from agentrl.errors import WriteError
from agentrl.runtime.atomic_directory import (
    atomic_directory,
    clear_leftovers,
    commit_directory,
    stage_directory,
)


def write(target: Path, text: str) -> Path:
    staging = stage_directory(target)
    (staging / "model.safetensors").write_text(text)
    commit_directory(staging, target)
    return target


def test_a_directory_appears_at_once_and_replaces_its_predecessor(tmp_path: Path) -> None:
    target = tmp_path / "000012"
    write(target, "first")
    write(target, "second")
    assert (target / "model.safetensors").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["000012"]


def test_a_failed_move_leaves_the_predecessor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write(tmp_path / "000001", "good")
    staging = stage_directory(target)
    (staging / "model.safetensors").write_text("next")
    rename = Path.rename

    def full(path: Path, to: Path) -> Path:
        if path == staging:
            raise OSError(28, "No space left on device")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(WriteError, match="No space left"):
        commit_directory(staging, target)
    assert (target / "model.safetensors").read_text() == "good"
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"cannot write .*file/000001: Not a directory"):
        stage_directory(tmp_path / "file" / "000001")


def test_leftovers_of_a_crash_are_cleared_and_a_displaced_directory_returns(tmp_path: Path) -> None:
    (tmp_path / ".000002.77.tmp").mkdir()
    displaced = tmp_path / ".000001.77.old"
    displaced.mkdir()
    (displaced / "model.safetensors").write_text("kept")
    (tmp_path / "000003").mkdir()
    clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001", "000003"]
    assert (tmp_path / "000001" / "model.safetensors").read_text() == "kept"


def test_what_a_killed_writer_leaves_is_cleared(tmp_path: Path) -> None:
    writer = os.fork()
    if writer == 0:
        with atomic_directory(tmp_path / "000001") as partial:
            (partial / "model.safetensors").write_text("half")
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == 9
    assert len(list(tmp_path.iterdir())) == 1
    clear_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(OSError(28, "No space left on device"), WriteError), (KeyError("name"), KeyError)],
    ids=["disk", "other"],
)
def test_a_failure_while_writing_leaves_the_predecessor_and_no_litter(
    tmp_path: Path, failure: Exception, raised: type[Exception]
) -> None:
    target = write(tmp_path / "000001", "good")

    def fail() -> None:
        with atomic_directory(target) as staging:
            (staging / "model.safetensors").write_text("half")
            raise failure

    with pytest.raises(raised):
        fail()
    assert (target / "model.safetensors").read_text() == "good"
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]
