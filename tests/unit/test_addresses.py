import pytest

from agentrl.addresses import host_name, http_address, is_loopback


@pytest.mark.parametrize(
    ("header", "name", "is_local"),
    [
        ("localhost:8000", "localhost", True),
        ("127.8.0.1", "127.8.0.1", True),
        ("[::1]:8000", "::1", True),
        ("[::1]evil", "[::1]evil", False),
        ("127.0.0.1.evil.org:80", "127.0.0.1.evil.org", False),
        ("0.0.0.0:80", "0.0.0.0", False),
    ],
)
def test_a_host_header_names_this_machine_or_another(
    header: str, name: str, is_local: bool
) -> None:
    assert host_name(header) == name
    assert is_loopback(name) == is_local


def test_addresses_of_ipv6_hosts_are_written_in_brackets() -> None:
    assert http_address("::1", 80) == "http://[::1]:80"
    assert http_address("127.0.0.1", 80) == "http://127.0.0.1:80"
