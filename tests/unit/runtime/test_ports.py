import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from agentrl.errors import ConfigError
from agentrl.runtime.ports import ReservedPort, free_port, listening, listening_near, listens

HOST = "127.0.0.1"
LISTENER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening", flush=True)
sys.stdin.read()
"""
needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere ports cannot be held for a child"
)


@pytest.fixture
def reserved() -> Iterator[ReservedPort]:
    with ReservedPort(HOST) as port:
        yield port


@needs_linux
def test_reserved_port_is_given_to_nobody_else(reserved: ReservedPort) -> None:
    with ReservedPort(HOST, reserved.port) as other:
        assert other.port != reserved.port


@needs_linux
def test_child_listens_on_a_reserved_port(reserved: ReservedPort) -> None:
    assert not listens(os.getpid(), reserved.port)
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER, str(reserved.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"listening\n"
        assert listens(child.pid, reserved.port)
        assert listens(os.getpid(), reserved.port)  # as a descendant's
        assert not listens(child.pid, reserved.port + 1)
        child.communicate(timeout=60)
    assert not listens(child.pid, reserved.port)


def test_port_of_a_stranger_is_left_alone() -> None:
    with (
        socket.create_server((HOST, 0)) as stranger,
        ReservedPort(HOST, taken := stranger.getsockname()[1]) as port,
    ):
        assert taken < port.port < taken + 50
        assert free_port(HOST, taken) != taken


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        ReservedPort("192.0.2.1", 30000)


def test_a_port_that_is_taken_is_refused_in_words_that_help() -> None:
    with socket.create_server((HOST, 0)) as stranger:
        taken = stranger.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            listening(HOST, taken)
    assert str(refused.value) == (
        f"cannot listen on {HOST}:{taken}: the port is in use; choose another with --port"
    )
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:1: Cannot assign requested address$"):
        listening("192.0.2.1", 1)


def test_the_next_port_is_taken_where_another_process_was_first() -> None:
    with socket.create_server((HOST, 0)) as other:
        first = other.getsockname()[1]
        with listening_near(HOST, first) as near, listening_near(HOST, first) as further:
            ports = {first, near.getsockname()[1], further.getsockname()[1]}
    assert len(ports) == 3
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0: Cannot assign requested address$"):
        listening_near("192.0.2.1", 8000)


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_addresses_of_both_families_can_be_listened_on() -> None:
    for host in (HOST, "::1"):
        port = free_port(host)
        with listening(host, port) as listener, listening_near(host, port) as near:
            assert listener.getsockname()[:2] == (host, port)
            assert near.getsockname()[0] == host
        with ReservedPort(host) as held:
            assert held.port
