"""The dialect `/inference/v1/generate` of vLLM: token ids in, token ids out.

Spoken by prime-rl, verifiers and their renderers: the client renders prompts and parses replies
itself. Unsupported fields that would change the sampling are rejected by name.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt

from agentrl.errors import APIError
from agentrl.inference.dialects.dialect import Dialect
from agentrl.inference.dialects.openai_common import (
    CompletionBody,
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


class _Sampling(CompletionBody):
    """The supported fields of vLLM's `SamplingParams`."""

    model: str = ""
    logprobs: int | None = Field(default=None, ge=0)


class _GenerateBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    token_ids: list[StrictInt]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    model: str | None = None
    stream: bool = False
    features: Any = None


class _GenerateCall:
    """A call of this dialect."""

    def __init__(self, body: Mapping[str, Any], session: ModelSession) -> None:
        parsed = parse_body(_GenerateBody, body)
        require(not parsed.stream, "stream", "streaming is not supported here; use false")
        require(not parsed.features, "features", "token prompts cannot hold images here")
        ids = parsed.token_ids
        require(
            bool(ids) and 0 <= min(ids) <= max(ids) <= MAX_INT32,
            "token_ids",
            "must be one list of token ids",
        )
        try:
            sampling = parse_body(_Sampling, parsed.sampling_params)
            sampling_request = sampling.sampling(sampling.max_tokens)
        except APIError as error:
            raise APIError(
                f"sampling_params.{error}", code=error.code, param=f"sampling_params.{error.param}"
            ) from None
        require((sampling.logprobs or 0) <= 1, "sampling_params.logprobs", "use 0 or 1")
        self._request = TextRequest(
            model=parsed.model or session.model,
            prompt=tuple(ids),
            sampling=sampling_request,
            logprobs=sampling.logprobs is not None,
            token_ids=True,
        )
        request_id = body.get("request_id")
        self._id = request_id if isinstance(request_id, str) and request_id else self._request.id
        self._session = session

    @property
    def stream(self) -> bool:
        return False

    async def run(self, on_delta: OnDelta | None) -> Completion:
        return await self._session.complete(self._request, on_delta)

    def body(self, completion: Completion) -> dict[str, Any]:
        logprobs: list[dict[str, Any]] = [
            {"token": f"token_id:{id_}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for id_, (_, logprob) in zip(
                completion.output_ids, completion.token_logprobs, strict=False
            )
        ]
        choice = {
            "index": 0,
            "token_ids": list(completion.output_ids),
            "finish_reason": completion.finish_reason,
            "logprobs": {"content": logprobs} if self._request.logprobs else None,
        }
        return {"request_id": self._id, "choices": [choice], "prompt_logprobs": None}

    def delta_events(self, _delta: Delta) -> Iterator[str]:
        yield from ()  # responses are never streamed

    def final_events(self, completion: Completion) -> Iterator[str]:
        yield f"data: {json.dumps(self.body(completion))}\n\n"

    def error_events(self, error: APIError) -> Iterator[str]:
        yield f"data: {json.dumps(error_body(error))}\n\n"


DIALECT = Dialect("/inference/v1/generate", _GenerateCall, error_body, schema_of(_GenerateBody))
