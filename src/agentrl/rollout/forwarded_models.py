"""Models that are not trained: calls to them are forwarded to their servers.

The servers speak OpenAI's protocol and may belong to third parties; `--agent_routes` names them.
"""

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, get_args

import httpx

from agentrl.config.secrets import redact
from agentrl.config.sections import AgentSection
from agentrl.errors import APIError, InferenceError, UnreadableReply
from agentrl.inference.dialects.messages import read_message
from agentrl.inference.dialects.session import FinishReason
from agentrl.runtime.http.bounded_replies import NOT_COMPRESSED, json_of, read_reply
from agentrl.runtime.http.http_clients import open_client
from agentrl.schema import Message, ToolCall

FORWARDED_REFUSED = "refused_by_server"
"""Error code for a request that another model's server refused."""
_RETRYABLE_STATUSES = (408, 409, 429)
_MAX_REPLY_BYTES = 16 << 20
_MAX_ERROR_CHARS = 500
_EXCHANGE_SECONDS = 600.0
_TIMEOUT = httpx.Timeout(_EXCHANGE_SECONDS, connect=10.0)
_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class ForwardedModel:
    """Address and key of a model."""

    base_url: str
    """OpenAI-compatible, with its `/v1`."""
    model: str
    """Its name on that server."""
    api_key: str | None


@dataclass(frozen=True)
class ForwardedReply:
    """A reply of another model."""

    message: Message
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    server: str


class ForwardedModels:
    """All forwarded models of a process, and a client for them."""

    def __init__(self, models: Mapping[str, Mapping[str, str]], client: httpx.AsyncClient) -> None:
        """Read the addresses of the models.

        Args:
            models: name of a model -> `base_url` and, if needed, `model` (its name on the server)
                and `api_key_env` (the environment variable that holds the key).
            client: used but not closed; its owner closes it.
        """
        self._client = client
        self._models = {
            name: ForwardedModel(
                base_url=model["base_url"].rstrip("/"),
                model=model.get("model", name),
                api_key=os.environ.get(model["api_key_env"]) if "api_key_env" in model else None,
            )
            for name, model in models.items()
        }

    @classmethod
    @asynccontextmanager
    async def open(cls, agents: AgentSection) -> AsyncIterator["ForwardedModels"]:
        """Yield the models of `--agent_routes`, reached through a client of their own."""
        routes = {} if agents.agent_routes is None else agents.agent_routes.get_secret_value()
        async with open_client(timeout=_TIMEOUT, headers=NOT_COMPRESSED) as client:
            yield cls(routes, client)

    @property
    def names(self) -> tuple[str, ...]:
        """Names that agents use for them."""
        return tuple(self._models)

    async def ask(self, name: str, body: Mapping[str, Any]) -> ForwardedReply:
        """Forward a chat request."""
        model = self._models[name]
        sent = {key: value for key, value in body.items() if key != "stream_options"}
        headers = {} if model.api_key is None else {"Authorization": f"Bearer {model.api_key}"}
        try:
            status, reply = await read_reply(
                self._client,
                "POST",
                f"{model.base_url}/chat/completions",
                max_bytes=_MAX_REPLY_BYTES,
                seconds=_EXCHANGE_SECONDS,
                json={**sent, "model": model.model, "stream": False},
                headers=headers,
            )
        except (httpx.HTTPError, TimeoutError) as error:
            raise InferenceError(
                f"the server of {name!r} ({redact(model.base_url)}) cannot be reached ({type(error).__name__})"
            ) from error
        except UnreadableReply as error:
            raise InferenceError(f"the server of {name!r}: {error}") from error
        if status >= 500 or status in _RETRYABLE_STATUSES:
            raise InferenceError(f"the server of {name!r} answered {status}: {_error_text(reply)}")
        if status >= 400:
            raise APIError(_error_text(reply), status=status, code=FORWARDED_REFUSED)
        return _parse_reply(name, model, reply)


def _error_text(reply: bytes) -> str:
    try:
        error = json_of(reply)["error"]
    except (UnreadableReply, KeyError, TypeError):
        error = reply[: 4 * _MAX_ERROR_CHARS].decode(errors="replace")
    text = str(error.get("message", error) if isinstance(error, dict) else error)
    return " ".join(text[: 2 * _MAX_ERROR_CHARS].split())[:_MAX_ERROR_CHARS]


def _parse_reply(name: str, model: ForwardedModel, reply: bytes) -> ForwardedReply:
    try:
        body = json_of(reply)
        choice = body["choices"][0]
        message = read_message({**choice["message"], "role": "assistant"}, 0)
        finish = choice.get("finish_reason")
        num_prompt, num_output = map(
            partial(_count, body.get("usage") or {}), ("prompt_tokens", "completion_tokens")
        )
    except (UnreadableReply, LookupError, TypeError, AttributeError, APIError) as error:
        raise InferenceError(
            f"the server of {name!r} sent something other than a chat completion ({error})"
        ) from error
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        calls.append(
            ToolCall(
                id=call["id"],
                name=call["function"]["name"],
                arguments=arguments if isinstance(arguments, dict) else {},
                format_error=None if isinstance(arguments, dict) else json.dumps(arguments),
            )
        )
    finish_reason = finish if finish in get_args(FinishReason) else "stop"
    return ForwardedReply(
        message=message,
        tool_calls=tuple(calls),
        finish_reason=cast("FinishReason", finish_reason),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        server=redact(model.base_url),
    )


def _count(usage: Mapping[str, Any], name: str) -> int:
    """Return a number of tokens; 0 if it is missing or impossible."""
    value = usage.get(name)
    return value if isinstance(value, int) and 0 <= value <= _MAX_COUNT else 0
