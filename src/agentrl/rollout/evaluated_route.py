"""A model of another server in the place of the policy: `agentrl eval --evaluated_route`.

It is reached through OpenAI's chat API, so its turns hold messages and no tokens.
"""

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast, get_args

import httpx

from agentrl.config.secrets import redact
from agentrl.config.sections import AgentSection
from agentrl.errors import APIError, ConfigError, InferenceError, UnreadableReply
from agentrl.inference.dialects.messages import read_message
from agentrl.inference.dialects.session import FinishReason
from agentrl.renderers.conversation import Conversation
from agentrl.renderers.reply import Reply
from agentrl.renderers.thinking import without_thinking
from agentrl.rewards.chat import Refused, Retryable, ask_chat, open_chat_client
from agentrl.runtime.http.bounded_replies import json_of
from agentrl.schema import Message, SamplingParams, ToolCall

ROUTE_REFUSED = "refused_by_server"
"""Error code for a request that the model's server refused."""
_MAX_ERROR_CHARS = 500
_EXCHANGE_SECONDS = 600.0
_TRIAL = {"messages": [{"role": "user", "content": "Reply with OK."}]}


@dataclass(frozen=True)
class RouteReply:
    """A reply of the evaluated model."""

    message: Message
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason

    def parsed(self) -> Reply:
        """Return it in the form of the policy's replies."""
        text = str(self.message["content"])
        reasoning = str(self.message.get("reasoning_content", ""))
        return Reply(text, without_thinking(text), reasoning, self.tool_calls, prose=text)

    def fields(self) -> dict[str, Any]:
        """Return the fields of the turn that stores it."""
        return {
            "output_text": str(self.message["content"]),
            "tool_calls": self.tool_calls,
            "finish_reason": "length" if self.finish_reason == "length" else "stop",
        }


@dataclass(frozen=True)
class EvaluatedRoute:
    """The model that answers in the place of the policy, and the client that reaches it."""

    base_url: str
    """OpenAI-compatible, with its `/v1`."""
    name: str
    """Its name on that server."""
    api_key: str
    client: httpx.AsyncClient

    @property
    def server(self) -> str:
        """Its address without secrets."""
        return redact(self.base_url)

    async def reply(
        self, conversation: Conversation, sampling: SamplingParams, images: Mapping[str, str]
    ) -> RouteReply:
        """Return its reply to a conversation."""
        body: dict[str, Any] = {
            "messages": [_sent(message, images) for message in conversation.history],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
        }
        if conversation.tools:
            body["tools"] = list(conversation.tools)
        return await self.ask(body)

    async def check(self) -> None:
        """Ask for one short reply."""
        try:
            await self.ask(_TRIAL)
        except (InferenceError, APIError) as error:
            raise ConfigError(f"--evaluated_route {self.name}: {error}") from None

    async def ask(self, body: Mapping[str, Any]) -> RouteReply:
        """Send a chat request under the model's own name, and return the whole reply."""
        sent = {key: value for key, value in body.items() if key != "stream_options"}
        sent |= {"model": self.name, "stream": False}
        try:
            choice = await ask_chat(
                self.client, self.base_url, self.api_key, sent, seconds=_EXCHANGE_SECONDS
            )
            return _reply_of(choice)
        except Retryable as error:
            raise InferenceError(f"{self.server}: {error}") from error
        except Refused as error:
            text = _error_text(error)
            raise APIError(text, status=error.status or 400, code=ROUTE_REFUSED) from error


@asynccontextmanager
async def open_evaluated_route(agents: AgentSection) -> AsyncIterator[EvaluatedRoute | None]:
    """Yield the model that is evaluated in the place of the policy, if one is named."""
    if agents.evaluated_route is None:
        yield None
        return
    route = agents.evaluated_route.get_secret_value()
    key = os.environ[route["api_key_env"]] if "api_key_env" in route else ""
    async with open_chat_client(_EXCHANGE_SECONDS) as client:
        yield EvaluatedRoute(route["base_url"].rstrip("/"), route["model"], key, client)


def _error_text(refused: Refused) -> str:
    """Return what the server says of its refusal, in one line."""
    try:
        error = json_of(refused.reply)["error"]
    except (UnreadableReply, KeyError, TypeError):
        error = str(refused)
    text = str(error.get("message", error) if isinstance(error, dict) else error)
    return " ".join(text[: 2 * _MAX_ERROR_CHARS].split())[:_MAX_ERROR_CHARS]


def _reply_of(choice: Mapping[str, Any]) -> RouteReply:
    try:
        message = read_message({**choice["message"], "role": "assistant"}, 0)
    except (TypeError, AttributeError, APIError) as error:
        raise Retryable(f"the response is not a chat completion ({error})") from error
    finish = choice.get("finish_reason")
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        is_object = isinstance(arguments, dict)
        calls.append(
            ToolCall(
                id=call["id"],
                name=call["function"]["name"],
                arguments=arguments if is_object else {},
                format_error=None if is_object else json.dumps(arguments),
            )
        )
    finish_reason = cast("FinishReason", finish if finish in get_args(FinishReason) else "stop")
    return RouteReply(message, tuple(calls), finish_reason)


def _sent(message: Message, images: Mapping[str, str]) -> Message:
    """Return a message as the API takes it: arguments are JSON text, images are inlined."""
    sent = dict(message)
    sent.pop("reasoning_content", None)
    if isinstance(sent["content"], list):
        sent["content"] = [_inlined(part, images) for part in sent["content"]]
    if "tool_calls" in sent:
        sent["tool_calls"] = [_with_json_arguments(call) for call in sent["tool_calls"]]
    return sent


def _inlined(part: dict[str, Any], images: Mapping[str, str]) -> dict[str, Any]:
    if part["type"] != "image_url":
        return part
    return {**part, "image_url": {"url": images[part["image_url"]["url"]]}}


def _with_json_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}
