"""HTTP clients for services outside of the run, by the proxy that the environment names.

Input: httpx's settings. Output: its client.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from agentrl.errors import ConfigError
from agentrl.runtime.http.proxies import proxy_variables


def open_client(**settings: Any) -> httpx.AsyncClient:
    """Return a client for several requests; its caller closes it."""
    with _explained_proxy_errors():
        return httpx.AsyncClient(**settings)


def check_proxy() -> None:
    """Check that agents and judges can use the proxy that the environment names."""
    with _explained_proxy_errors():
        httpx.Client().close()


@contextmanager
def _explained_proxy_errors() -> Iterator[None]:
    """Name the variables of a proxy that httpx rejects; their values may hold a password."""
    variables = " or ".join(proxy_variables(os.environ))
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{variables} is a SOCKS proxy, which requires pip install 'httpx[socks]'; install it, "
            "or unset the variable"
        ) from error
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(
            f"{variables} is not a proxy address; write http://HOST:PORT, or unset it"
        ) from error
