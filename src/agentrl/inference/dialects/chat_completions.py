"""Answers in the form of `/v1/chat/completions` and `/v1/completions`, whole or as a stream."""

import json
from collections.abc import Iterator
from typing import Any

from agentrl.inference.dialects.api_errors import Refusal
from agentrl.inference.dialects.completion import Completion
from agentrl.inference.dialects.deltas import Delta
from agentrl.inference.dialects.requests import ChatRequest, CompletionRequest

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


class ChatFrames:
    """A chat completion as server-sent events."""

    def __init__(self, request: ChatRequest) -> None:
        self._head = _head(request, "chat.completion.chunk")
        self._include_usage = request.include_usage
        self._begun = False

    def words(self, delta: Delta) -> Iterator[str]:
        """Yield what shows further words."""
        yield from self._begin()
        yield self._choice({delta.kind: delta.text})

    def end(self, completion: Completion) -> Iterator[str]:
        """Yield what shows the rest of a completion whose words were all shown."""
        yield from self._begin()
        for index, call in enumerate(wire_calls(completion)):
            yield self._choice({"tool_calls": [{"index": index, **call}]})
        yield self._choice(
            {},
            logprobs=_chat_logprobs(completion),
            finish_reason=completion.finish_reason,
        )
        if self._include_usage:
            yield frame({**self._head, "choices": [], "usage": usage(completion)})
        yield DONE

    def failed(self, refusal: Refusal) -> Iterator[str]:
        """Yield what ends the stream with an error."""
        yield frame(refusal.body)
        yield DONE

    def _begin(self) -> Iterator[str]:
        if not self._begun:
            self._begun = True
            yield self._choice({"role": "assistant", "content": ""})

    def _choice(self, delta: dict[str, Any], **end: Any) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **end}
        return frame({**self._head, "choices": [choice]})


def text_body(completion: Completion) -> dict[str, Any]:
    """Return a whole completion of a text."""
    choice = {
        "index": 0,
        "text": completion.message["content"],
        "logprobs": _text_logprobs(completion),
        "finish_reason": completion.finish_reason,
    }
    return {**_head(completion, "text_completion"), "choices": [choice], "usage": usage(completion)}


class TextFrames:
    """A completion of a text as server-sent events."""

    def __init__(self, request: CompletionRequest) -> None:
        self._head = _head(request, "text_completion")
        self._include_usage = request.include_usage

    def words(self, delta: Delta) -> Iterator[str]:
        """Yield what shows further words."""
        yield self._choice(delta.text)

    def end(self, completion: Completion) -> Iterator[str]:
        """Yield what shows the rest of a completion whose words were all shown."""
        yield self._choice(
            "", logprobs=_text_logprobs(completion), finish_reason=completion.finish_reason
        )
        if self._include_usage:
            yield frame({**self._head, "choices": [], "usage": usage(completion)})
        yield DONE

    def failed(self, refusal: Refusal) -> Iterator[str]:
        """Yield what ends the stream with an error."""
        yield frame(refusal.body)
        yield DONE

    def _choice(self, text: str, **end: Any) -> str:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **end}
        return frame({**self._head, "choices": [choice]})


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


def _head(call: Completion | ChatRequest | CompletionRequest, kind: str) -> dict[str, Any]:
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {
        "id": f"{prefix}-{call.id}",
        "object": kind,
        "created": call.created,
        "model": call.model,
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
