"""A model of another server in the place of the policy: `agentrl eval --evaluated_route NAME`.

It is reached through OpenAI's chat API, so its turns hold messages and no tokens.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agentrl.config.sections import AgentSection
from agentrl.errors import APIError, ConfigError, InferenceError
from agentrl.renderers.conversation import Conversation
from agentrl.renderers.reply import Reply
from agentrl.renderers.thinking import without_thinking
from agentrl.rollout.forwarded_models import ForwardedModels, ForwardedReply
from agentrl.schema import Message, SamplingParams
from agentrl.schema.image import image_addresses

_TRIAL = {"messages": [{"role": "user", "content": "Reply with OK."}]}


@dataclass(frozen=True)
class EvaluatedRoute:
    """The model that answers in the place of the policy, and the client that reaches it."""

    models: ForwardedModels
    name: str
    """Its name in `--agent_routes`."""

    async def reply(
        self, conversation: Conversation, sampling: SamplingParams, images: Mapping[str, str]
    ) -> ForwardedReply:
        """Return its reply to a conversation."""
        body: dict[str, Any] = {
            "messages": [_sent(message, images) for message in conversation.history],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
        }
        if conversation.tools:
            body["tools"] = list(conversation.tools)
        return await self.models.ask(self.name, body)

    async def check(self) -> None:
        """Ask for one short reply."""
        try:
            await self.models.ask(self.name, _TRIAL)
        except (InferenceError, APIError) as error:
            raise ConfigError(f"--evaluated_route {self.name}: {error}") from None


@asynccontextmanager
async def open_evaluated_route(agents: AgentSection) -> AsyncIterator[EvaluatedRoute | None]:
    """Yield the model that is evaluated in the place of the policy, if one is named."""
    if agents.evaluated_route is None:
        yield None
        return
    async with ForwardedModels.open(agents) as models:
        yield EvaluatedRoute(models, agents.evaluated_route)


def parsed_reply(reply: ForwardedReply) -> Reply:
    """Return another model's reply in the form of the policy's."""
    text = str(reply.message["content"])
    content = without_thinking(text)
    reasoning = str(reply.message.get("reasoning_content", ""))
    return Reply(text, content, reasoning, reply.tool_calls, prose=text)


def addresses_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the addresses of the images in messages, each once."""
    return tuple(dict.fromkeys(image_addresses(messages)))


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
