"""What a call is answered with, whatever the form that it was asked in."""

from dataclasses import dataclass
from typing import Literal

from agentrl.renderers import Reply
from agentrl.schema import Message

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Completion:
    """An answered call."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    message: Message
    """`content`, and where there are any `tool_calls` (arguments as objects) and
    `reasoning_content`."""
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    token_logprobs: tuple[tuple[str, float], ...] = ()
    """Every sampled token as text, with its logprob."""


def as_delivered(reply: Reply, *, may_call: bool, stop: tuple[str, ...] = ()) -> Message:
    """Return a reply as the agent framework is given it, arguments as objects.

    A call that cannot be parsed is not handed on as one: the text in which it stands is.
    """
    message: Message = {"role": "assistant"}
    if reply.reasoning.strip():
        message["reasoning_content"] = reply.reasoning
    well_formed = all(call.format_error is None for call in reply.tool_calls)
    if reply.tool_calls and may_call and well_formed:
        message["content"] = cut(reply.content, stop).strip()
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.tool_calls
        ]
        return message
    text = reply.content
    if reply.tool_calls:
        text = reply.text.rpartition("</think>")[2] if reply.reasoning else reply.text
    text = cut(text, stop)
    return {**message, "content": text.strip() if reply.reasoning else text}


def with_call_ids(message: Message, mark: str) -> Message:
    """Return a reply whose calls have ids that no other rollout uses.

    Frameworks that keep the messages of all their conversations in one place tell calls apart by
    id alone, and a turn's own ids are the same in every rollout.
    """
    if "tool_calls" not in message:
        return message
    calls = [{**call, "id": f"{call['id']}_{mark}"} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def cut(text: str, stop: tuple[str, ...]) -> str:
    """Return what stands before the first stop text."""
    for end in stop:
        text = text.partition(end)[0]
    return text
