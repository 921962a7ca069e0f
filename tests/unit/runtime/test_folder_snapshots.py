"""What a folder holds comes back, and nothing else is read or written."""

import os
import zlib
from pathlib import Path

import pytest
from support.little_memory import little_memory

from agentrl.runtime.folder_snapshots import MAX_SNAPSHOT_BYTES, pack_folders, unpack_folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all that a program may leave in one."""
    made = tmp_path / "made"
    (made / "deep/er").mkdir(parents=True)
    (made / "empty").mkdir()
    (made / "deep/er/run.sh").write_bytes(b"#!/bin/sh\n\xff")
    (made / "deep/er/run.sh").chmod(0o750)
    (made / "away").symlink_to("/etc/hostname")
    (made / "gone").symlink_to("nowhere")
    os.mkfifo(made / "pipe")
    return made


def test_files_modes_links_and_empty_folders_come_back_in_place_of_others(
    folder: Path, tmp_path: Path
) -> None:
    packed = pack_folders({"work": folder})
    assert packed is not None
    target = tmp_path / "target"
    (target / "old").mkdir(parents=True)
    (target / "away").symlink_to(tmp_path)
    unpack_folders(packed, {"work": target})
    assert {path.name for path in target.iterdir()} == {"deep", "empty", "away", "gone"}
    script = target / "deep/er/run.sh"
    assert script.read_bytes() == b"#!/bin/sh\n\xff"
    assert script.stat().st_mode == (folder / "deep/er/run.sh").stat().st_mode
    assert [os.readlink(target / name) for name in ("away", "gone")] == ["/etc/hostname", "nowhere"]
    assert pack_folders({"work": target}) == packed


def test_each_folder_gets_what_was_its_own(tmp_path: Path) -> None:
    names = ("one", "two")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(name)
    packed = pack_folders({name: tmp_path / name for name in names})
    assert packed is not None
    targets = {name: tmp_path / f"new {name}" for name in names}
    for target in targets.values():
        target.mkdir()
    unpack_folders(packed, targets)
    assert [(target / "name").read_text() for target in targets.values()] == list(names)


def test_what_is_too_large_or_gone_has_no_snapshot(tmp_path: Path) -> None:
    (tmp_path / "half").write_bytes(bytes(MAX_SNAPSHOT_BYTES // 2))
    assert pack_folders({"all": tmp_path}) is not None
    (tmp_path / "more").write_bytes(bytes(MAX_SNAPSHOT_BYTES // 2 + 1))
    assert pack_folders({"all": tmp_path}) is None
    assert pack_folders({"all": tmp_path / "nowhere"}) is None


def test_a_snapshot_that_nobody_makes_fills_no_memory(tmp_path: Path) -> None:
    packed = zlib.compress(bytes(1 << 30), 9)
    with little_memory(1 << 28), pytest.raises(ValueError, match="larger than any that is made"):
        unpack_folders(packed, {"work": tmp_path})
