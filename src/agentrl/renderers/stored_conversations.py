"""Conversations from stored turns: messages in OpenAI's form, with thinking and calls apart."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from agentrl.renderers.reply import Reply, parse_reply
from agentrl.renderers.thinking import THINK_CLOSE, THINK_OPEN
from agentrl.renderers.tool_calls.call_format_registry import all_tool_call_formats
from agentrl.schema import DispatchedSamplingTask, Message
from agentrl.schema.turn import CONTINUING


def conversations_of(
    turns: Sequence[DispatchedSamplingTask],
) -> Iterator[tuple[list[Message], list[dict[str, Any]]]]:
    """Yield the conversations of an attempt, and the tools that each was shown.

    Every reply of the policy is trained on once: an assistant message that is repeated in a context
    or in another conversation gets `"weight": 0`.
    """
    included: set[int] = set()
    for path, tools in paths_of(turns):
        messages: list[Message] = []
        for previous, turn in zip([None, *path[:-1]], path, strict=True):
            if previous is not None:
                messages += [_result(result) for result in previous.tool_results]
            messages += [_context(message) for message in turn.added_messages]
            message = assistant_message(turn, tools)
            messages.append({**message, "weight": 0} if turn.index in included else message)
            included.add(turn.index)
        yield messages, tools


def paths_of(
    turns: Sequence[DispatchedSamplingTask],
) -> Iterator[tuple[list[DispatchedSamplingTask], list[dict[str, Any]]]]:
    """Yield the turns of each conversation of an attempt, and the tools that it was shown.

    A turn is part of every conversation that continues it. Calls of other models are omitted unless
    the policy continues them.
    """
    continued = {turn.parent for turn in turns if _continues(turn)}
    for leaf in turns:
        if leaf.index in continued or not leaf.trainable:
            continue
        path = [leaf]
        while _continues(path[-1]):
            path.append(turns[path[-1].parent or 0])
        yield path[::-1], _tools_of(path[-1], turns)


def assistant_message(turn: DispatchedSamplingTask, tools: Sequence[dict[str, Any]]) -> Message:
    """Return a reply as a message, with thinking and tool calls in separate fields.

    The format of its calls is the one that parses the same calls as the rollout; if there is none,
    the text is kept unchanged.
    """
    reply = _parsed_reply(turn, tools)
    if reply is None:
        return {"role": "assistant", "content": turn.output_text}
    message: Message = {"role": "assistant", "content": reply.content.strip()}
    if reply.reasoning.strip():
        message["reasoning_content"] = reply.reasoning.strip()
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for call in turn.tool_calls
        ]
    return message


def _parsed_reply(turn: DispatchedSamplingTask, tools: Sequence[dict[str, Any]]) -> Reply | None:
    text = turn.output_text
    if any(call.format_error is not None for call in turn.tool_calls):
        return None  # a guessed call must not become training data
    before, closes, _ = text.partition(THINK_CLOSE)
    starts_inside = bool(closes) and THINK_OPEN not in before
    call_names = [call.name for call in turn.tool_calls]
    for format_ in all_tool_call_formats():
        reply = parse_reply(text, format_, starts_inside=starts_inside, tools=tools)
        if [call.name for call in reply.tool_calls] == call_names:
            return reply
    return None


def _continues(turn: DispatchedSamplingTask) -> bool:
    return turn.parent is not None and turn.branch_reason in CONTINUING


def _tools_of(
    turn: DispatchedSamplingTask, turns: Sequence[DispatchedSamplingTask]
) -> list[dict[str, Any]]:
    while turn.parent is not None:
        turn = turns[turn.parent]
    return [dict(tool) for tool in turn.tools]


def _result(result: Any) -> Message:
    return {
        "role": "tool",
        "tool_call_id": result.call_id,
        "name": result.name,
        "content": result.content,
    }


def _context(message: Message) -> Message:
    return {**message, "weight": 0} if message.get("role") == "assistant" else message
