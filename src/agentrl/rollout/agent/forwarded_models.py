"""Models that are not trained: an agent's calls to them are forwarded, and stored without tokens.

The servers speak OpenAI's protocol and may belong to third parties; `--agent_routes` names them.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, get_args

import httpx

from agentrl.config.secrets import redact
from agentrl.errors import APIError, InferenceError, UnreadableReply
from agentrl.inference.dialects.continuation import ContinuationIndex, conversation_key
from agentrl.inference.dialects.messages import read_message
from agentrl.inference.dialects.session import ChatRequest, Completion, FinishReason
from agentrl.rollout.async_sampler import AsyncSampler
from agentrl.runtime.http.bounded_replies import json_of, read_reply
from agentrl.schema import Message, Seat, ToolCall

FORWARDED_REFUSED = "refused_by_server"
"""Error code for a request that another model's server refused."""
_RETRYABLE_STATUSES = (408, 409, 429)
_MAX_REPLY_BYTES = 16 << 20
_MAX_ERROR_CHARS = 500
_EXCHANGE_SECONDS = 600.0
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
class _ForwardedReply:
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

    @property
    def names(self) -> tuple[str, ...]:
        """Names that agents use for them."""
        return tuple(self._models)

    async def ask(self, name: str, body: Mapping[str, Any]) -> _ForwardedReply:
        """Forward a chat request.

        Args:
            name: a name of `names`.
            body: the request as the agent made it.

        Raises:
            InferenceError: the endpoint did not answer, or may answer a retry.
            APIError: it refused the request itself.
        """
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


class ForwardedCalls:
    """One rollout's calls to other models: turns alongside the policy's, without loss."""

    def __init__(self, sampler: AsyncSampler[Any], models: ForwardedModels) -> None:
        self._sampler = sampler
        self._models = models
        self._turns = ContinuationIndex[int]()
        """Indices of turns; the scope of a conversation is the caller's seat and the model's name."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that are forwarded to."""
        return self._models.names

    async def ask(
        self, request: ChatRequest, messages: Sequence[Message], seat: Seat | None
    ) -> Completion:
        """Return another model's reply; the turn is durable on return.

        Args:
            request: forwarded unchanged.
            messages: its messages, images under the addresses where they are stored.
            seat: the agent that calls, in a rollout of several.

        Raises:
            InferenceError: the endpoint gave no answer.
            APIError: it refused the request itself.
        """
        started_at = self._sampler.now()
        reply = await self._models.ask(request.model, request.raw)
        conversation = conversation_key(messages, scope=f"{seat} {request.model}")
        num_known, turns = next(self._turns.matches(conversation), (0, ()))
        turn = await self._sampler.note_call(
            parent=turns[-1] if turns else None,
            added_messages=tuple(messages[num_known:]),
            output_text=reply.message["content"],
            tool_calls=reply.tool_calls,
            finish_reason="length" if reply.finish_reason == "length" else "stop",
            model=request.model,
            seat=seat,
            server=reply.server,
            started_at=started_at,
        )
        self._turns.add(conversation, reply.message, turn.index)
        return Completion(
            id=request.id,
            created=request.created,
            model=request.model,
            message=reply.message,
            finish_reason=reply.finish_reason,
            num_prompt_tokens=reply.num_prompt_tokens,
            num_output_tokens=reply.num_output_tokens,
        )


def _error_text(reply: bytes) -> str:
    try:
        error = json_of(reply)["error"]
    except (UnreadableReply, KeyError, TypeError):
        error = reply[: 4 * _MAX_ERROR_CHARS].decode(errors="replace")
    text = str(error.get("message", error) if isinstance(error, dict) else error)
    return " ".join(text[: 2 * _MAX_ERROR_CHARS].split())[:_MAX_ERROR_CHARS]


def _parse_reply(name: str, model: ForwardedModel, reply: bytes) -> _ForwardedReply:
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
    return _ForwardedReply(
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
