"""One ask of a language model behind an OpenAI-compatible endpoint."""

import asyncio
import json
import ssl
from collections.abc import Mapping
from functools import cache
from typing import Any

import httpx

from agentrl.rewards.agent_config import ModelEndpoint


class Retryable(Exception):
    """This ask failed; the next one may not."""


class GiveUp(Exception):
    """Asking this model again is of no use."""


def open_client(timeout: float) -> httpx.AsyncClient:
    """Return a client for several asks; its caller closes it."""
    return httpx.AsyncClient(timeout=timeout, verify=_ssl_context())


async def ask(
    client: httpx.AsyncClient,
    endpoint: ModelEndpoint,
    prompt: str,
    *,
    timeout_seconds: float,
    extra_body: Mapping[str, Any],
) -> str:
    """Return the model's reply to one user message.

    Args:
        client: what `open_client` returned.
        endpoint: the model.
        prompt: the user message.
        timeout_seconds: longest wait for the whole reply.
        extra_body: further keys of the request.

    Raises:
        Retryable: the server failed, was too slow, or sent no chat completion.
        GiveUp: the server refused the request, or the address is none.
    """
    key = endpoint.api_key.get_secret_value()
    body = {
        **extra_body,
        "model": endpoint.model,
        "messages": [{"role": "user", "content": prompt}],
    }
    try:
        # The client's own timeout counts silence; this one counts the whole ask.
        async with asyncio.timeout(timeout_seconds):
            response = await client.post(
                f"{endpoint.base_url.rstrip('/')}/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {key}"} if key else {},
            )
    except (httpx.TransportError, TimeoutError) as error:
        raise Retryable(f"{type(error).__name__}: {error}".rstrip(": ")) from error
    except (httpx.InvalidURL, UnicodeError) as error:
        raise GiveUp(str(error)) from error
    if response.status_code in (408, 409, 429) or response.status_code >= 500:
        raise Retryable(f"HTTP {response.status_code}")
    if response.status_code >= 300:
        raise GiveUp(f"HTTP {response.status_code}")
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (json.JSONDecodeError, LookupError, TypeError) as error:
        raise Retryable("the reply is not a chat completion") from error
    if not isinstance(content, str):
        raise Retryable("the reply has no text")
    return content


@cache
def _ssl_context() -> ssl.SSLContext:
    # Reading the certificate store takes tens of milliseconds: once is enough.
    return ssl.create_default_context()
