"""Checks whether an external service responds: the model hub, a tracker, a user's server.

Input: an address. Output: why it does not respond. Libraries retry for half a minute before they
report a failure; a user at a terminal should know within seconds.
"""

import queue
import threading

import httpx

ANSWER_SECONDS = 3.0


def unreachable_reason(url: str) -> str | None:
    """Return why an address does not respond, or None if it does."""
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
