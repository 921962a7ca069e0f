"""The part of a conversation that stays when its context is full or the model repeats itself.

Pure functions on messages. Adjacent messages of one role are joined, because many chat templates
require roles to alternate. Untrusted text (from tools or a summary) appears in user messages only,
where it cannot become a control token.
"""

from collections.abc import Sequence
from typing import Any

from agentrl.schema import Message

SUMMARY_INTRODUCTION = "Your work so far was removed from the context. This is a summary of it:"
WORK_DISCARDED = "Your work so far was removed from the context to make room. Go on."
RESULTS_DISCARDED = (
    "The results of your tool calls so far were removed from the context to make room. Go on, and "
    "call a tool again where you still need what it said."
)
_MIN_KEPT_MESSAGES = 10
_MAX_DROPPED_MESSAGES = 15


def without_tool_results(messages: Sequence[Message], opening: Sequence[Message]) -> list[Message]:
    """Drop all tool results and, if the rest is long, its end (`discard_all_tools`).

    If n messages remain without tool results, the last `min(15, n - 10)` are dropped as well: an
    agent that filled its context has probably lost its way. The opening always stays.
    """
    without_results = [message for message in messages if message["role"] != "tool"]
    num_dropped = min(_MAX_DROPPED_MESSAGES, max(0, len(without_results) - _MIN_KEPT_MESSAGES))
    kept = without_results[: len(without_results) - num_dropped]
    kept = [*opening, *kept[len(opening) :]]
    return joined([*kept, {"role": "user", "content": RESULTS_DISCARDED}])


def only_the_opening(opening: Sequence[Message], summary: str | None) -> list[Message]:
    """Keep the opening and, if there is one, a summary of the rest (`discard_all`)."""
    note = WORK_DISCARDED if summary is None else f"{SUMMARY_INTRODUCTION}\n\n{summary}"
    return joined([*opening, {"role": "user", "content": note}])


def without_repetitions(messages: Sequence[Message]) -> list[Message]:
    """Drop every reply that repeats an earlier one, with what followed it."""
    kept: list[Message] = []
    seen: set[str] = set()
    dropping = False
    for message in messages:
        if message["role"] == "assistant":
            text = str(message["content"]).strip()
            dropping = text in seen
            seen.add(text)
        if not dropping:
            kept.append(message)
    return kept


def joined(messages: Sequence[Message]) -> list[Message]:
    """Join adjacent messages of the same role; tool results stay separate."""
    result: list[Message] = []
    for message in messages:
        if result and result[-1]["role"] == message["role"] != "tool":
            content = _joined(result[-1]["content"], message["content"])
            result[-1] = {**result[-1], "content": content}
        else:
            result.append(message)
    return result


def as_text(messages: Sequence[Message]) -> str:
    """Return a transcript for the summarizer."""
    return "\n\n".join(
        f"[{message.get('name') or message['role']}]\n{_text(message['content'])}"
        for message in messages
    )


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts(first), {"type": "text", "text": "\n\n"}, *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _text(content: Any) -> str:
    """Return a message's content as text, with `[image]` in place of each image."""
    return "".join(part.get("text", "[image]") for part in _parts(content))
