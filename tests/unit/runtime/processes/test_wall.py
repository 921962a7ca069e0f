"""Ways to leave the wall, and to take more than its bounds, as a user's own programs and as root's."""

import os
from pathlib import Path

import pytest
from harness.attacks.wall_rooms import STRANGER, bombed, seen_outside, stage, tried, unconfined

from agentrl.runtime.processes.wall import wall_gap

pytestmark = pytest.mark.skipif(wall_gap() is not None, reason="the machine has no namespaces")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="starts programs of another user")
HELD = (
    *("shared memory that is no longer mapped", "memfds in a socket", "files in a nested tmpfs"),
    *("memfds of a process that nobody may look into", "many files"),
    "memfds while the watcher is kept from opening files",
)


@pytest.mark.parametrize(
    "door", ["wall of root", pytest.param("wall of another user", marks=needs_root)]
)
def test_no_way_leads_out(door: str) -> None:
    found = tried(door)
    assert (found["left"], found["read"]) == ([], [])
    assert found["control"] > found["tried"] // 3


def test_what_is_planted_is_found_where_nothing_confines(tmp_path: Path) -> None:
    with stage(tmp_path) as given:
        found = unconfined(given)
        assert seen_outside(given) == {}
    assert {f"read {secret}" for secret in given["secrets"]} <= found.keys()
    ways = ("tmux runs a command", "ssh-agent signs", "abstract socket", "process_vm_readv")
    assert {*ways, "a kernel by its connection file", "files by io_uring"} <= found.keys()


@pytest.mark.parametrize("user", [None, pytest.param(STRANGER, marks=needs_root)])
@pytest.mark.parametrize("name", HELD)
def test_what_no_list_of_files_and_processes_shows_is_bounded(
    name: str, user: int | None, tmp_path: Path
) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # the other user reads the program
    assert not bombed(tmp_path, name, user)["is_kept"]
