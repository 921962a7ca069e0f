import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config.atomic_file import atomic_file, write_atomically
from agentrl.config.private_files import write_private


@pytest.fixture
def common_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("common_umask")
def test_a_file_is_replaced_and_nothing_else_remains(tmp_path: Path) -> None:
    target = tmp_path / "summary.json"
    write_atomically(target, "first")
    write_atomically(target, "zwölf")
    assert target.read_text(encoding="utf-8") == "zwölf"
    assert mode(target) == 0o644
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_write_leaves_the_old_content_and_no_other_file(tmp_path: Path) -> None:
    target = tmp_path / "summary.json"
    write_atomically(target, "first")

    def fail() -> None:
        with atomic_file(target) as staging:
            staging.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert target.read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def test_content_is_on_disk_before_it_replaces_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "summary.json"
    flushed: list[tuple[str, bool]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), target.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    write_atomically(target, "first")
    (staging, existed), (folder, exists) = flushed
    assert (Path(staging).parent, existed) == (tmp_path, False)
    assert (folder, exists) == (str(tmp_path), True)


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    target = tmp_path / "summary.json"
    with atomic_file(target) as one, atomic_file(target) as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert target.read_text() == "one"  # the last to end
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.usefixtures("common_umask")
def test_a_private_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    target = tmp_path / "secrets" / "key"
    write_private(target, b"k")
    assert (mode(target.parent), mode(target)) == (0o700, 0o600)
