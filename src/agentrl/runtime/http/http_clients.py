"""Clients for services outside of the run, by the environment's proxy, and whether one responds."""

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from agentrl.errors import ConfigError
from agentrl.runtime.http.proxies import proxy_variables

ANSWER_SECONDS = 3.0


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


def unreachable_reason(url: str) -> str | None:
    """Return why an address does not respond, or None if it does.

    Libraries retry for half a minute before they report a failure; a user at a terminal should know
    within seconds.
    """
    results: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # An unreachable name server blocks a thread for longer than any timeout of httpx.
    threading.Thread(target=lambda: results.put(_request_problem(url)), daemon=True).start()
    try:
        return results.get(timeout=ANSWER_SECONDS + 0.5)
    except queue.Empty:
        return f"no response within {ANSWER_SECONDS:g} s"


def _request_problem(url: str) -> str | None:
    try:
        # No content is exchanged; the library that uses the address checks its certificate.
        httpx.head(url, timeout=ANSWER_SECONDS, verify=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    except ImportError:
        return "the SOCKS proxy of the environment requires pip install 'httpx[socks]'"
    return None
