"""Other models' endpoints, for agents that talk to more models than the trained one."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import httpx

from agentrl.errors import InferenceError
from agentrl.inference.dialects.api_errors import Refusal
from agentrl.inference.dialects.messages import read_message
from agentrl.schema import Message, ToolCall

_TRY_AGAIN = (408, 409, 429)


@dataclass(frozen=True)
class Route:
    """Where a model is served."""

    base_url: str
    """OpenAI-compatible, with its `/v1`."""
    model: str
    """Its name there."""
    api_key: str | None


@dataclass(frozen=True)
class Answer:
    """What another model said."""

    message: Message
    tool_calls: tuple[ToolCall, ...]
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_prompt_tokens: int
    num_output_tokens: int
    server: str


class Upstream:
    """The routes, and a client for all of them."""

    def __init__(self, routes: Mapping[str, Mapping[str, str]], client: httpx.AsyncClient) -> None:
        """Prepare.

        Args:
            routes: name of a model -> `base_url`, and if need be `model` (its name there) and
                `api_key_env` (the environment variable that holds the key).
            client: is closed by its owner.
        """
        self._client = client
        self._routes = {
            name: Route(
                base_url=route["base_url"].rstrip("/"),
                model=route.get("model", name),
                api_key=os.environ.get(route["api_key_env"]) if "api_key_env" in route else None,
            )
            for name, route in routes.items()
        }

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that have a route."""
        return tuple(self._routes)

    async def ask(self, model: str, body: Mapping[str, Any]) -> Answer:
        """Send a chat request on.

        Args:
            model: a name with a route.
            body: the request as the agent made it.

        Raises:
            InferenceError: the endpoint gave no answer, or may give one later.
            Refusal: it refused the request as such.
        """
        route = self._routes[model]
        sent = {key: value for key, value in body.items() if key != "stream_options"}
        headers = {} if route.api_key is None else {"Authorization": f"Bearer {route.api_key}"}
        try:
            response = await self._client.post(
                f"{route.base_url}/chat/completions",
                json={**sent, "model": route.model, "stream": False},
                headers=headers,
            )
        except httpx.HTTPError as error:
            raise InferenceError(
                f"the route of {model!r} ({route.base_url}) cannot be used ({type(error).__name__})"
            ) from error
        if response.status_code >= 500 or response.status_code in _TRY_AGAIN:
            raise InferenceError(
                f"the route of {model!r} answered {response.status_code}: {_said(response)}"
            )
        if response.status_code >= 400:
            raise Refusal(_said(response), status=response.status_code, code="refused_by_route")
        return _read(model, route, response)


def _said(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return " ".join(response.text.split())[:500]
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _read(model: str, route: Route, response: httpx.Response) -> Answer:
    try:
        body = response.json()
        choice = body["choices"][0]
        message = read_message({**choice["message"], "role": "assistant"}, 0)
        finish = choice.get("finish_reason")
        usage = body.get("usage") or {}
    except (ValueError, LookupError, TypeError, AttributeError, Refusal) as error:
        raise InferenceError(
            f"the route of {model!r} sent something that is no chat completion ({error})"
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
    known = finish if finish in ("stop", "length", "tool_calls") else "stop"
    return Answer(
        message=message,
        tool_calls=tuple(calls),
        finish_reason=cast("Literal['stop', 'length', 'tool_calls']", known),
        num_prompt_tokens=int(usage.get("prompt_tokens") or 0),
        num_output_tokens=int(usage.get("completion_tokens") or 0),
        server=route.base_url,
    )
