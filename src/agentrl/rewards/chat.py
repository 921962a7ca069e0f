"""Requests to language models behind OpenAI-compatible endpoints: judges, the summarizer, an evaluated one.

The caller decides what an outage means (a missing score, a failed attempt).
"""

import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cache, partial
from typing import Any, TypeVar, cast

import httpx

from agentrl.errors import InferenceError, UnreadableReply
from agentrl.rewards.agent_config import ChatModels, ModelEndpoint
from agentrl.rewards.judge_gate import MayNotAsk
from agentrl.runtime.http.bounded_replies import NOT_COMPRESSED, json_of, read_reply
from agentrl.runtime.http.http_clients import open_client
from agentrl.runtime.retries import retried

_T = TypeVar("_T")
Admit = Callable[[ModelEndpoint], AbstractAsyncContextManager[None]]
"""Returns the context in which a request is sent to a model."""
_MAX_REPLY_BYTES = 8 << 20


class Retryable(Exception):
    """A request failed, or its reply is unusable; a retry may succeed."""


class Refused(Exception):
    """Another request to this model is pointless.

    Attributes:
        status: of HTTP; 0 if nothing could be sent.
        reply: the body of the reply.
    """

    def __init__(self, reason: str, status: int = 0, reply: bytes = b"") -> None:
        super().__init__(reason)
        self.status = status
        self.reply = reply


def open_chat_client(timeout: float) -> httpx.AsyncClient:
    """Return a client for several requests; its caller closes it."""
    return open_client(timeout=timeout, verify=_ssl_context(), headers=NOT_COMPRESSED)


async def ask_models(
    client: httpx.AsyncClient,
    settings: ChatModels,
    prompt: str,
    read: Callable[[str], _T],
    *,
    backoff_factor: float = 2.0,
    admit: Admit | None = None,
) -> tuple[str, _T]:
    """Ask the models in order until one returns a usable reply."""

    async def attempt(endpoint: ModelEndpoint) -> _T:
        async with nullcontext() if admit is None else admit(endpoint):
            reply = await _ask(client, endpoint, settings, prompt)
        return read(reply)

    pauses = [settings.retry_delay * backoff_factor**n for n in range(settings.max_retries)]
    reasons = []
    for endpoint in settings.models:
        try:
            ask = partial(attempt, endpoint)
            return endpoint.model, await retried(ask, on=Retryable, pauses=pauses)
        except (Retryable, Refused, MayNotAsk) as error:
            reasons.append(f"{endpoint.model}: {error}")
    raise InferenceError("; ".join(reasons))


async def _ask(
    client: httpx.AsyncClient, endpoint: ModelEndpoint, settings: ChatModels, prompt: str
) -> str:
    """Return one model's reply to one user message."""
    body = {
        **settings.extra_body,
        "model": endpoint.model,
        "messages": [{"role": "user", "content": prompt}],
    }
    key = endpoint.api_key.get_secret_value()
    choice = await ask_chat(client, endpoint.base_url, key, body, seconds=settings.timeout)
    content = choice["message"].get("content")
    if not isinstance(content, str):
        raise Retryable("the response has no text")
    return content


async def ask_chat(
    client: httpx.AsyncClient, base_url: str, key: str, body: Mapping[str, Any], *, seconds: float
) -> dict[str, Any]:
    """Return the first choice of a chat completion, which has a message.

    Raises:
        Retryable: a network or the server failed, or the reply is unusable.
        Refused: the server refused the request.
    """
    try:
        status, reply = await read_reply(
            client,
            "POST",
            f"{base_url.rstrip('/')}/chat/completions",
            max_bytes=_MAX_REPLY_BYTES,
            seconds=seconds,
            json=body,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
    except UnreadableReply as error:
        raise Retryable(str(error)) from error
    except (httpx.TransportError, TimeoutError) as error:
        raise Retryable(f"{type(error).__name__}: {error}".rstrip(": ")) from error
    except (httpx.InvalidURL, UnicodeError) as error:
        raise Refused(str(error)) from error
    if status in (408, 409, 429) or status >= 500:
        raise Retryable(f"HTTP {status}")
    if status >= 300:
        raise Refused(f"HTTP {status}", status, reply)
    try:
        choice = json_of(reply)["choices"][0]
        choice["message"]["content"]
    except (UnreadableReply, LookupError, TypeError) as error:
        raise Retryable("the response is not a chat completion") from error
    return cast("dict[str, Any]", choice)


@cache
def _ssl_context() -> ssl.SSLContext:
    # Cached, because reading the certificate store takes tens of milliseconds.
    return ssl.create_default_context()
