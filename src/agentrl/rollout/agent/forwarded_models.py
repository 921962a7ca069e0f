"""Models that are not trained: an agent's calls for them are forwarded, and stored without tokens.

The servers are OpenAI-compatible and anybody's; `--agent_routes` names them.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import httpx

from agentrl.config.secret_text import redact
from agentrl.errors import APIError, InferenceError
from agentrl.inference.dialects.continuation import ContinuationIndex, conversation_key
from agentrl.inference.dialects.messages import read_message
from agentrl.inference.dialects.session import ChatRequest, Completion, FinishReason
from agentrl.rollout.async_sampler import AsyncSampler
from agentrl.schema import Message, ToolCall

FORWARDED_REFUSED = "refused_by_server"
"""Code of the refusal of another model's server."""
_TRY_AGAIN = (408, 409, 429)


@dataclass(frozen=True)
class ForwardedModel:
    """Where a model is served."""

    base_url: str
    """OpenAI-compatible, with its `/v1`."""
    model: str
    """Its name there."""
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
        """Read where the models are.

        Args:
            models: name of a model -> `base_url`, and if need be `model` (its name there) and
                `api_key_env` (the environment variable that holds the key).
            client: is closed by its owner.
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
        """Names by which agents ask for them."""
        return tuple(self._models)

    async def ask(self, name: str, body: Mapping[str, Any]) -> _ForwardedReply:
        """Forward a chat request.

        Args:
            name: a name of `names`.
            body: the request as the agent made it.

        Raises:
            InferenceError: the endpoint gave no answer, or may give one later.
            APIError: it refused the request as such.
        """
        model = self._models[name]
        sent = {key: value for key, value in body.items() if key != "stream_options"}
        headers = {} if model.api_key is None else {"Authorization": f"Bearer {model.api_key}"}
        try:
            response = await self._client.post(
                f"{model.base_url}/chat/completions",
                json={**sent, "model": model.model, "stream": False},
                headers=headers,
            )
        except httpx.HTTPError as error:
            raise InferenceError(
                f"the server of {name!r} ({redact(model.base_url)}) cannot be reached ({type(error).__name__})"
            ) from error
        if response.status_code >= 500 or response.status_code in _TRY_AGAIN:
            raise InferenceError(
                f"the server of {name!r} answered {response.status_code}: {_error_text(response)}"
            )
        if response.status_code >= 400:
            raise APIError(
                _error_text(response), status=response.status_code, code=FORWARDED_REFUSED
            )
        return _read(name, model, response)


class ForwardedCalls:
    """The calls of one rollout for other models: turns beside the policy's, without loss."""

    def __init__(self, sampler: AsyncSampler[Any], models: ForwardedModels) -> None:
        self._sampler = sampler
        self._models = models
        self._turns = ContinuationIndex[int]()
        """Indexes of turns; the scope of a conversation is the model's name."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that are forwarded to."""
        return self._models.names

    async def ask(self, request: ChatRequest, messages: Sequence[Message]) -> Completion:
        """Return another model's reply; the turn is durable on return.

        Args:
            request: is forwarded as the agent made it.
            messages: its messages, images under the addresses where they are stored.

        Raises:
            InferenceError: the endpoint gave no answer.
            APIError: it refused the request as such.
        """
        started_at = self._sampler.now()
        reply = await self._models.ask(request.model, request.raw)
        asked = conversation_key(messages, scope=request.model)
        known, turns = next(self._turns.matches(asked), (0, ()))
        turn = await self._sampler.note_call(
            parent=turns[-1] if turns else None,
            added_messages=tuple(messages[known:]),
            output_text=reply.message["content"],
            tool_calls=reply.tool_calls,
            finish_reason="length" if reply.finish_reason == "length" else "stop",
            model=request.model,
            server=reply.server,
            started_at=started_at,
        )
        self._turns.add(asked, reply.message, turn.index)
        return Completion(
            id=request.id,
            created=request.created,
            model=request.model,
            message=reply.message,
            finish_reason=reply.finish_reason,
            num_prompt_tokens=reply.num_prompt_tokens,
            num_output_tokens=reply.num_output_tokens,
        )


def _error_text(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return " ".join(response.text.split())[:500]
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _read(name: str, model: ForwardedModel, response: httpx.Response) -> _ForwardedReply:
    try:
        body = response.json()
        choice = body["choices"][0]
        message = read_message({**choice["message"], "role": "assistant"}, 0)
        finish = choice.get("finish_reason")
        usage = body.get("usage") or {}
    except (ValueError, LookupError, TypeError, AttributeError, APIError) as error:
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
    known = finish if finish in get_args(FinishReason) else "stop"
    return _ForwardedReply(
        message=message,
        tool_calls=tuple(calls),
        finish_reason=cast("FinishReason", known),
        num_prompt_tokens=int(usage.get("prompt_tokens") or 0),
        num_output_tokens=int(usage.get("completion_tokens") or 0),
        server=redact(model.base_url),
    )
