"""Ports that a confined program cannot connect to, by any way that the kernel knows."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.runtime.processes import confinement
from agentrl.runtime.processes.confinement import (
    Confinement,
    confinement_gap,
    open_ports_reason,
)

pytestmark = pytest.mark.skipif(
    open_ports_reason() is not None, reason="the kernel cannot close ports"
)
CONNECT = """
import json, socket, sys
FAST_OPEN, MPTCP, SMC = 0x20000000, 262, 256

def plainly(port):
    socket.create_connection(("127.0.0.1", port))

def over_ipv6(port):
    socket.socket(socket.AF_INET6).connect(("::ffff:127.0.0.1", port))

def by(protocol):
    def connect(port):
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol).connect(("127.0.0.1", port))
    return connect

def by_fast_open(port):
    socket.socket().sendto(b"x", FAST_OPEN, ("127.0.0.1", port))

def by_message(port):
    socket.socket().sendmsg([b"x"], [], FAST_OPEN, ("127.0.0.1", port))

ways = {"plainly": plainly, "over IPv6": over_ipv6, "multipath TCP": by(MPTCP), "SMC": by(SMC),
    "fast open": by_fast_open, "fast open of a message": by_message}
found = {}
for port in map(int, sys.argv[1:]):
    found[port] = []
    for name, connect in ways.items():
        try:
            connect(port)
        except OSError:
            continue
        found[port].append(name)
print(json.dumps(found))
"""


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as other:
        yield one.getsockname()[1], other.getsockname()[1]


def ways_to_connect(
    scratch: Path, ports: tuple[int, int], closed: tuple[int, ...]
) -> list[set[str]]:
    """Return how a program reaches each port."""
    scratch.mkdir()
    bounds = Confinement(scratch=scratch, closed_ports=closed)
    command = bounds.command([sys.executable, "-c", CONNECT, *map(str, ports)])
    found = json.loads(subprocess.check_output(command, env=bounds.environment(), timeout=60))
    return [set(found[str(port)]) for port in ports]


def test_a_closed_port_is_reached_in_no_way(tmp_path: Path, ports: tuple[int, int]) -> None:
    every_way = ways_to_connect(tmp_path / "open", ports, ())
    assert {"plainly", "over IPv6", "fast open"} <= every_way[0]
    assert every_way[0] == every_way[1]
    closed, other = ways_to_connect(tmp_path / "closed", ports, (ports[0],))
    assert closed == set()
    assert other == {"plainly", "over IPv6"}


@pytest.mark.skipif(confinement_gap() is not None, reason="the machine has no namespaces")
def test_ports_are_closed_without_namespaces_as_well(
    tmp_path: Path, ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confinement, "confinement_gap", lambda: "the test has none")
    closed, other = ways_to_connect(tmp_path / "closed", ports, (ports[0],))
    assert closed == set()
    assert "plainly" in other
