"""What programs leave behind is removed, whatever it is."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.runtime.processes.wall import remove_folder, scratch_directory
from agentrl.tools.servers.client_session import scratch_folder

NUM_LEVELS = 1_500


def nest(folder: Path) -> None:
    """Make more levels than the standard library can remove, whose path is too long to name."""
    inside = os.open(folder, os.O_RDONLY)
    for _ in range(NUM_LEVELS):
        os.mkdir("d", dir_fd=inside)
        next_inside = os.open("d", os.O_RDONLY, dir_fd=inside)
        os.close(inside)
        inside = next_inside
    os.close(inside)


def lock(folder: Path) -> None:
    (folder / "locked" / "inner").mkdir(parents=True)
    (folder / "locked").chmod(0)


@pytest.mark.parametrize("leave", [nest, lock])
async def test_whatever_a_program_leaves_is_removed(leave: Callable[[Path], None]) -> None:
    with scratch_directory("agentrl-test-") as root:
        leave(Path(root))
    assert not os.path.lexists(root)
    async with scratch_folder() as folder:
        leave(folder)
    assert not os.path.lexists(folder)


def test_what_links_point_to_stays(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(0o500)
    folder = tmp_path / "-rf"
    folder.mkdir()
    (folder / "link").symlink_to(kept)
    lock(folder)
    remove_folder(folder)
    assert not folder.exists()
    assert kept.stat().st_mode & 0o777 == 0o500
    linked = tmp_path / "linked"
    linked.symlink_to(kept)
    remove_folder(linked)
    assert [*tmp_path.iterdir()] == [kept]
