"""How addresses of hosts and servers are written, and which of them are of this machine only."""

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """Return a Host header's name without the port and an IPv6 address's brackets."""
    if host.startswith("["):
        name, end, port = host[1:].partition("]")
        return name if end and port[:1] in ("", ":") else host
    return host.partition(":")[0]


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an address to listen on."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def http_address(host: str, port: int) -> str:
    """Return the URL of a server at an address, without a path."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
