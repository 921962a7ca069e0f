"""All ways to leave the wall, from inside each of the programs that a model may control.

`harness.attacks.wall_rooms` plants marks, starts what lives outside, and opens the doors with the
product's own code; what takes memory, disk and processes runs behind walls of small bounds.
"""

import os

import pytest
from harness.attacks.wall_rooms import DOORS, STRANGER, all_bombed, tried

from agentrl.runtime.processes.wall import wall_gap

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(wall_gap() is not None, reason="the machine has no namespaces"),
]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="starts programs of another user")


@pytest.mark.parametrize(
    "door",
    [pytest.param(door, marks=needs_root if "another" in door else ()) for door in DOORS],
)
def test_no_door_leads_out(door: str) -> None:
    found = tried(door)
    assert (found["left"], found["read"]) == ([], [])


@pytest.mark.parametrize("user", [None, pytest.param(STRANGER, marks=needs_root)])
def test_no_program_keeps_twice_its_bounds(user: int | None) -> None:
    found = all_bombed(user)
    assert [name for name, one in found.items() if one["is_kept"]] == []
