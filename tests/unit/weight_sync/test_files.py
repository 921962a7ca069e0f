import hashlib
from pathlib import Path

import pytest

from agentrl.errors import PublishError
from agentrl.weight_sync.files import (
    checksum,
    clear_leftovers,
    put_in_place,
    remove_old_versions,
    stage,
    version_dir,
    weight_bytes,
)


def write(target: Path, text: str) -> Path:
    staging = stage(target)
    (staging / "model.safetensors").write_text(text)
    return put_in_place(staging, target)


def test_a_directory_appears_whole_and_replaces_its_predecessor(tmp_path: Path) -> None:
    target = version_dir(tmp_path, 12)
    assert target.name == "000012"
    write(target, "first")
    write(target, "second")
    assert (target / "model.safetensors").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["000012"]


def test_a_failed_move_leaves_the_predecessor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write(version_dir(tmp_path, 1), "good")
    staging = stage(target)
    (staging / "model.safetensors").write_text("next")
    rename = Path.rename

    def full(path: Path, to: Path) -> Path:
        if path == staging:
            raise OSError(28, "No space left on device")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(PublishError, match="No space left"):
        put_in_place(staging, target)
    assert (target / "model.safetensors").read_text() == "good"
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PublishError, match=r"cannot write .*file/000001: Not a directory"):
        stage(version_dir(tmp_path / "file", 1))


def test_leftovers_of_a_crash_are_cleared_and_a_displaced_directory_returns(tmp_path: Path) -> None:
    (tmp_path / ".000002.77.tmp").mkdir()
    displaced = tmp_path / ".000001.77.old"
    displaced.mkdir()
    (displaced / "model.safetensors").write_text("kept")
    (tmp_path / "000003").mkdir()
    clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001", "000003"]
    assert (tmp_path / "000001" / "model.safetensors").read_text() == "kept"


def test_checksum_runs_over_the_weight_files_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "b.safetensors").write_bytes(b"two")
    (tmp_path / "a.safetensors").write_bytes(b"one")
    (tmp_path / "config.json").write_bytes(b"{}")
    assert checksum(tmp_path) == hashlib.sha256(b"onetwo").hexdigest()
    assert weight_bytes(tmp_path) == 6


def test_old_versions_go_except_the_newest_and_those_in_use(tmp_path: Path) -> None:
    for version in range(6):
        version_dir(tmp_path, version).mkdir()
    (tmp_path / "notes").mkdir()
    assert remove_old_versions(tmp_path, keep=2, in_use={1}) == [0, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000001",
        "000004",
        "000005",
        "notes",
    ]


def test_the_latest_version_is_never_removed(tmp_path: Path) -> None:
    for version in range(3):
        version_dir(tmp_path, version).mkdir()
    remove_old_versions(tmp_path, keep=0, in_use=())
    assert [path.name for path in tmp_path.iterdir()] == ["000002"]
