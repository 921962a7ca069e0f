"""Answers in the form of `/v1/chat/completions` and `/v1/completions`, whole or as a stream."""

import json
from collections.abc import Iterator
from typing import Any

from agentrl.gateway.completion import Completion

DONE = "data: [DONE]\n\n"


def wire_calls(completion: Completion) -> list[dict[str, Any]]:
    """Return the tool calls, arguments as JSON text."""
    return [
        {
            **call,
            "function": {
                "name": call["function"]["name"],
                "arguments": as_json(call["function"]["arguments"]),
            },
        }
        for call in completion.message.get("tool_calls", ())
    ]


def as_json(arguments: Any) -> str:
    """Return the arguments of a call as JSON text; what is text already was no JSON."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def chat_body(completion: Completion) -> dict[str, Any]:
    """Return a whole chat completion."""
    calls = wire_calls(completion)
    message = {
        **completion.message,
        # No words beside a call are no content, as at OpenAI's.
        "content": completion.message["content"] or (None if calls else ""),
        **({"tool_calls": calls} if calls else {}),
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _chat_logprobs(completion),
        "finish_reason": completion.finish_reason,
    }
    return {
        **_head(completion, "chat.completion"),
        "choices": [choice],
        "usage": usage(completion),
    }


def chat_frames(completion: Completion, *, include_usage: bool) -> Iterator[str]:
    """Yield a chat completion as server-sent events."""
    head = _head(completion, "chat.completion.chunk")
    calls = wire_calls(completion)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if "reasoning_content" in completion.message:
        deltas.append({"reasoning_content": completion.message["reasoning_content"]})
    if completion.message["content"]:
        deltas.append({"content": completion.message["content"]})
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(calls)]
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        yield frame({**head, "choices": [choice]})
    end = {
        "index": 0,
        "delta": {},
        "logprobs": _chat_logprobs(completion),
        "finish_reason": completion.finish_reason,
    }
    yield frame({**head, "choices": [end]})
    if include_usage:
        yield frame({**head, "choices": [], "usage": usage(completion)})
    yield DONE


def text_body(completion: Completion) -> dict[str, Any]:
    """Return a whole completion of a text."""
    choice = {
        "index": 0,
        "text": completion.message["content"],
        "logprobs": _text_logprobs(completion),
        "finish_reason": completion.finish_reason,
    }
    return {**_head(completion, "text_completion"), "choices": [choice], "usage": usage(completion)}


def text_frames(completion: Completion, *, include_usage: bool) -> Iterator[str]:
    """Yield a completion of a text as server-sent events."""
    body = text_body(completion)
    shown = body.pop("usage")
    yield frame(body)
    if include_usage:
        yield frame({**body, "choices": [], "usage": shown})
    yield DONE


def usage(completion: Completion) -> dict[str, Any]:
    """Return the tokens of a call."""
    return {
        "prompt_tokens": completion.num_prompt_tokens,
        "completion_tokens": completion.num_output_tokens,
        "total_tokens": completion.num_prompt_tokens + completion.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": completion.num_cached_tokens},
    }


def frame(data: dict[str, Any]) -> str:
    """Return one server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _head(completion: Completion, kind: str) -> dict[str, Any]:
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {
        "id": f"{prefix}-{completion.id}",
        "object": kind,
        "created": completion.created,
        "model": completion.model,
    }


def _chat_logprobs(completion: Completion) -> dict[str, Any] | None:
    if not completion.token_logprobs:
        return None
    return {
        "content": [
            {
                "token": token,
                "logprob": logprob,
                "bytes": list(token.encode()),
                "top_logprobs": [],
            }
            for token, logprob in completion.token_logprobs
        ],
        "refusal": None,
    }


def _text_logprobs(completion: Completion) -> dict[str, Any] | None:
    if not completion.token_logprobs:
        return None
    tokens = [token for token, _ in completion.token_logprobs]
    offsets = [sum(map(len, tokens[:position])) for position in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [logprob for _, logprob in completion.token_logprobs],
        "text_offset": offsets,
        "top_logprobs": None,
    }
