import os
import subprocess
import sys

from agentrl.runtime.processes.process_identity import is_alive, is_dead, new_lease_owner


def dead_owner() -> str:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    host, _, suffix = new_lease_owner().rsplit(":", 2)
    return f"{host}:{ended.pid}:{suffix}"


def test_only_processes_of_this_host_and_namespace_are_judged() -> None:
    owner = new_lease_owner()
    assert is_alive(owner)
    assert not is_dead(owner)
    assert is_dead(dead_owner())
    for elsewhere in (f"other:{os.getpid()}:1-a", owner.rsplit(":", 1)[0] + ":0-a"):
        assert not is_alive(elsewhere)
        assert not is_dead(elsewhere)


def test_every_owner_has_a_name_of_its_own() -> None:
    assert new_lease_owner() != new_lease_owner()
