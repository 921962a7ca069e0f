"""Excludes loopback addresses from the environment's proxies (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY).

Input: an environment. Output: variables with which every HTTP library, including an agent's,
connects to loopback addresses directly; a proxy would resolve them to its own machine.
"""

from collections.abc import Mapping

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_EXCEPTIONS = ("no_proxy", "NO_PROXY")
_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})


def proxy_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that set a proxy."""
    return [name for name, value in environment.items() if value and name.lower() in _PROXIES]


def direct_to_this_machine(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set; none if the environment sets no proxy."""
    if not proxy_variables(environment):
        return {}
    # Libraries differ in which of the two they read.
    exceptions = next((environment[name] for name in _EXCEPTIONS if environment.get(name)), "")
    hosts = [host.strip() for host in exceptions.split(",") if host.strip()]
    hosts += [host for host in _LOOPBACK if host not in hosts]
    return dict.fromkeys(_EXCEPTIONS, ",".join(hosts))
