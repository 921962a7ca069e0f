"""The dialect `/v1/completions`: a text, or token ids, to be continued."""

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.errors import APIError
from agentrl.inference.dialects.dialect import Dialect
from agentrl.inference.dialects.openai_common import (
    DONE,
    CompletionBody,
    error_body,
    event,
    head,
    parse_body,
    require,
    usage,
)
from agentrl.inference.dialects.session import (
    Completion,
    Delta,
    ModelSession,
    OnDelta,
    TextRequest,
)


class _TextBody(CompletionBody):
    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None


def _read_text(body: Mapping[str, Any]) -> TextRequest:
    parsed = parse_body(_TextBody, body)
    require(not parsed.echo, "echo", "the prompt is not repeated; use false")
    require(parsed.best_of in (None, 1), "best_of", "use 1")
    require(parsed.suffix is None, "suffix", "text is only added at the end")
    require((parsed.logprobs or 0) <= 1, "logprobs", "alternatives are not kept; use 1")
    prompt = parsed.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    is_ids = isinstance(prompt, list) and all(type(id_) is int for id_ in prompt)
    require(
        bool(prompt) and (is_ids or isinstance(prompt, str)),
        "prompt",
        "one text, or one list of token ids",
    )
    return TextRequest(
        model=parsed.model,
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        sampling=parsed.sampling(parsed.max_tokens),
        logprobs=parsed.logprobs is not None,
        stream=parsed.stream,
        include_usage=parsed.include_usage,
    )


class _TextCall:
    """A call of this dialect."""

    def __init__(self, body: Mapping[str, Any], session: ModelSession) -> None:
        self._request = _read_text(body)
        self._session = session
        self._head = head(self._request, "text_completion")

    @property
    def stream(self) -> bool:
        return self._request.stream

    async def run(self, on_delta: OnDelta | None) -> Completion:
        return await self._session.complete(self._request, on_delta)

    def body(self, completion: Completion) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": completion.message["content"],
            "logprobs": _logprobs(completion),
            "finish_reason": completion.finish_reason,
        }
        return {
            **head(completion, "text_completion"),
            "choices": [choice],
            "usage": usage(completion),
        }

    def delta_events(self, delta: Delta) -> Iterator[str]:
        yield self._choice(delta.text)

    def final_events(self, completion: Completion) -> Iterator[str]:
        yield self._choice(
            "", logprobs=_logprobs(completion), finish_reason=completion.finish_reason
        )
        if self._request.include_usage:
            yield event({**self._head, "choices": [], "usage": usage(completion)})
        yield DONE

    def error_events(self, error: APIError) -> Iterator[str]:
        yield event(error_body(error))
        yield DONE

    def _choice(self, text: str, **end: Any) -> str:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **end}
        return event({**self._head, "choices": [choice]})


DIALECT = Dialect("/v1/completions", _TextCall, error_body)


def _logprobs(completion: Completion) -> dict[str, Any] | None:
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
