import hashlib
from pathlib import Path

import pytest

from agentrl.errors import PublishError
from agentrl.weight_sync.files import (
    checksum,
    clear_leftovers,
    remove_old_versions,
    version_dir,
    weight_bytes,
    write_atomically,
)


def fill_with(text: str):
    def fill(directory: Path) -> None:
        (directory / "model.safetensors").write_text(text)

    return fill


def test_a_directory_appears_whole_and_replaces_its_predecessor(tmp_path: Path) -> None:
    target = version_dir(tmp_path, 12)
    assert target.name == "000012"
    write_atomically(target, fill_with("first"))
    write_atomically(target, fill_with("second"))
    assert (target / "model.safetensors").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["000012"]


def test_a_failed_write_leaves_the_predecessor(tmp_path: Path) -> None:
    target = write_atomically(version_dir(tmp_path, 1), fill_with("good"))

    def fail(directory: Path) -> None:
        (directory / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(PublishError, match="No space left"):
        write_atomically(target, fail)
    assert (target / "model.safetensors").read_text() == "good"
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]


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
