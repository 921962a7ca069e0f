"""Shared by OpenAI's dialects: checks of a request's fields, errors, bodies and events."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.errors import APIError
from agentrl.inference.dialects.session import CallRequest, Completion, SamplingRequest
from agentrl.inference.wire import MAX_INT32, MAX_SEED, MIN_REPETITION_PENALTY, MIN_SEED

_DONE = "data: [DONE]\n\n"
_MAX_STOPS = 16
_MAX_STOP_CHARS = 1024
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
REFUSED = {
    "logit_bias": "it would sample from another policy than the one that is trained",
    "min_tokens": "a reply ends where the policy ends it",
    "ignore_eos": "a reply ends where the policy ends it",
    "functions": "send them as tools",
    "function_call": "use tool_choice",
    "structured_outputs": "send a schema as response_format",
    "guided_json": "send a schema as response_format",
    "guided_regex": "send a schema as response_format",
    "guided_grammar": "send a schema as response_format",
    "guided_choice": "send a schema as response_format",
    "regex": "send a schema as response_format",
    "ebnf": "send a schema as response_format",
    "stop_token_ids": "replies end at the model's own stop tokens; send texts as stop",
    "bad_words": "a reply is the policy's own",
    "allowed_token_ids": "a reply is the policy's own",
    "logits_processors": "the policy's logits are not changed",
    "use_beam_search": "a reply is sampled",
    "truncate_prompt_tokens": "the policy sees the whole prompt",
    "continue_final_message": "a reply cannot be prefilled",
    "chat_template": "the run's template applies; set it with --chat_template",
    "chat_template_kwargs": "the run's settings apply; set them with --chat_template_kwargs",
    "web_search_options": "give the policy a search tool instead",
    "audio": "the policy writes text only",
    "prompt_logprobs": "logprobs of the prompt are not computed",
    "include_stop_str_in_output": "a reply is returned without its stop text; append it yourself",
}
"""Fields that every route rejects, because ignoring them would return something other than what was
requested, with the reason or the alternative."""
_Parsed = TypeVar("_Parsed", bound=BaseModel)


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class CompletionBody(BaseModel):
    """Fields of both completion routes.

    Other fields are hints to a provider and ignored, except those of `REFUSED`.
    """

    model_config = ConfigDict(extra="ignore")

    model: str
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT32)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(default=None, ge=MIN_REPETITION_PENALTY, le=2.0)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    seed: int | None = Field(default=None, ge=MIN_SEED, le=MAX_SEED)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    n: int | None = None
    return_token_ids: bool = False

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, max_tokens: int | None) -> SamplingRequest:
        """Return how to draw the tokens."""
        require(self.n in (None, 1), "n", "must be 1; make several calls instead")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        require(
            len(stop) <= _MAX_STOPS and all(0 < len(text) <= _MAX_STOP_CHARS for text in stop),
            "stop",
            f"must be at most {_MAX_STOPS} texts of 1 to {_MAX_STOP_CHARS} characters",
        )
        values = {name: getattr(self, name) for name in _SAMPLING}
        return SamplingRequest(
            params={name: value for name, value in values.items() if value is not None},
            max_tokens=max_tokens,
            seed=self.seed,
            stop=stop,
        )


def parse_body(kind: type[_Parsed], body: Mapping[str, Any]) -> _Parsed:
    """Return a request's body as a model of its fields."""
    refuse_unsupported(body)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or "body"
        raise APIError(f"{param}: {first['msg']}", param=param) from None


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Refuse a request that sets a field of `REFUSED`."""
    for name, reason in REFUSED.items():
        value = body.get(name)
        # vLLM's `prompt_logprobs` of 0 requests the logprobs of the prompt without alternatives.
        is_set = bool(value) or (name == "prompt_logprobs" and type(value) is int)
        require(not is_set, name, f"not supported; {reason}")


def require(condition: bool, param: str, message: str) -> None:
    """Refuse a request whose field cannot be used."""
    if not condition:
        raise APIError(f"{param}: {message}", code="unsupported_value", param=param)


def error_body(error: APIError) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    }


class CompletionCall(ABC):
    """A call of one of the completion routes; subclasses define the content of a choice."""

    def __init__(self, request: CallRequest, kind: str) -> None:
        """Store the checked request."""
        self._request = request
        self._kind = kind
        # Chunks of a text completion have the same `object` as the complete answer.
        is_chat = kind == "chat.completion"
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{request.id}"
        self._chunk_kind = f"{kind}.chunk" if is_chat else kind

    @property
    def stream(self) -> bool:
        """Whether the client wants server-sent events."""
        return self._request.stream

    @abstractmethod
    def _whole_choice(self, completion: Completion) -> dict[str, Any]:
        """Return the content of the choice of a complete answer."""

    @abstractmethod
    def _last_choices(self, completion: Completion) -> Iterator[dict[str, Any]]:
        """Yield the contents of the last choices of a stream."""

    def body(self, completion: Completion) -> dict[str, Any]:
        """Return the whole answer."""
        choice = {**self._whole_choice(completion), **self._token_ids(completion)}
        choice["finish_reason"] = completion.finish_reason
        body = self._body(self._kind, [{"index": 0, **choice}], usage=_usage(completion))
        if self._request.token_ids:
            body["prompt_token_ids"] = list(completion.prompt_ids)
        return body

    def final_events(self, completion: Completion) -> Iterator[str]:
        """Yield the events that end a stream, after all of its text was sent."""
        *earlier, last = self._last_choices(completion)
        for choice in (*earlier, {**last, **self._token_ids(completion)}):
            yield self._choice_event(choice)
        if self._request.include_usage:
            yield _event(self._body(self._chunk_kind, [], usage=_usage(completion)))
        yield _DONE

    def error_events(self, error: APIError) -> Iterator[str]:
        """Yield the events that end a stream with an error."""
        yield _event(error_body(error))
        yield _DONE

    def _token_ids(self, completion: Completion) -> dict[str, Any]:
        """Return the requested ids.

        SGLang's clients read the prompt's ids from the choice, vLLM's clients from the top level.
        """
        if not self._request.token_ids:
            return {}
        return {
            "prompt_token_ids": list(completion.prompt_ids),
            "token_ids": list(completion.output_ids),
        }

    def _choice_event(self, choice: Mapping[str, Any]) -> str:
        choice = {"index": 0, "logprobs": None, "finish_reason": None, **choice}
        return _event(self._body(self._chunk_kind, [choice]))

    def _body(self, kind: str, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        request = self._request
        head = {"id": self._id, "object": kind, "created": request.created, "model": request.model}
        return {**head, "choices": choices, **fields}


def _usage(completion: Completion) -> dict[str, Any]:
    return {
        "prompt_tokens": completion.num_prompt_tokens,
        "completion_tokens": completion.num_output_tokens,
        "total_tokens": completion.num_prompt_tokens + completion.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": completion.num_cached_tokens},
    }


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
