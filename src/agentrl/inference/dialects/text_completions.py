"""The dialect `/v1/completions`: a text, or token ids, to be continued."""

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.inference.dialects.dialect import Dialect
from agentrl.inference.dialects.openai_common import (
    CompletionBody,
    CompletionCall,
    error_body,
    parse_body,
    require,
)
from agentrl.inference.dialects.session import (
    Completion,
    Delta,
    ModelSession,
    OnDelta,
    TextRequest,
)
from agentrl.inference.openapi import schema_of
from agentrl.inference.wire import MAX_INT32


class _TextBody(CompletionBody):
    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None


def _read_text(body: Mapping[str, Any]) -> TextRequest:
    parsed = parse_body(_TextBody, body)
    require(not parsed.echo, "echo", "the prompt cannot be echoed; use false")
    require(parsed.best_of in (None, 1), "best_of", "use 1")
    require(parsed.suffix is None, "suffix", "text can only be appended; leave it out")
    require((parsed.logprobs or 0) <= 1, "logprobs", "alternatives are not returned; use 1")
    prompt = parsed.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    is_ids = isinstance(prompt, list) and all(
        type(id_) is int and 0 <= id_ <= MAX_INT32 for id_ in prompt
    )
    require(
        bool(prompt) and (is_ids or isinstance(prompt, str)),
        "prompt",
        "must be one text or one list of token ids",
    )
    return TextRequest(
        model=parsed.model,
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        sampling=parsed.sampling(parsed.max_tokens),
        logprobs=parsed.logprobs is not None,
        stream=parsed.stream,
        include_usage=parsed.include_usage,
        token_ids=parsed.return_token_ids,
    )


class _TextCall(CompletionCall):
    """A call of this dialect."""

    def __init__(self, body: Mapping[str, Any], session: ModelSession) -> None:
        self._text = _read_text(body)
        super().__init__(self._text, "text_completion")
        self._session = session

    async def run(self, on_delta: OnDelta | None) -> Completion:
        return await self._session.complete(self._text, on_delta)

    def delta_events(self, delta: Delta) -> Iterator[str]:
        yield self._choice_event({"text": delta.text})

    def _whole_choice(self, completion: Completion) -> dict[str, Any]:
        return {"text": completion.message["content"], "logprobs": _logprobs(completion)}

    def _last_choices(self, completion: Completion) -> Iterator[dict[str, Any]]:
        end = {"logprobs": _logprobs(completion), "finish_reason": completion.finish_reason}
        yield {"text": "", **end}


DIALECT = Dialect("/v1/completions", _TextCall, error_body, schema_of(_TextBody))


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
