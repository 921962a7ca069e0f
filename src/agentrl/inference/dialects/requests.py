"""What OpenAI's clients ask for, read and checked."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jsonschema import Draft202012Validator, SchemaError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.inference.dialects.api_errors import Refusal
from agentrl.inference.dialects.messages import read_message
from agentrl.schema import Message

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_TOOL_KEYS = ("name", "description", "parameters")
MAX_STOPS = 16
_Parsed = TypeVar("_Parsed", bound=BaseModel)


class _Body(BaseModel):
    """Fields that all routes share. Others are let through: most are hints to a provider."""

    model_config = ConfigDict(extra="ignore")

    model: str
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=2.0)
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    n: int | None = None


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class _ChatBody(_Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    stream_options: _StreamOptions | None = None


class _CompletionBody(_Body):
    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None
    stream_options: _StreamOptions | None = None


def _new_id() -> str:
    return secrets.token_hex(12)


def _now() -> int:
    return int(time.time())


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a call are to be drawn, as far as the agent says so."""

    params: Mapping[str, float | int] = field(default_factory=dict)
    """Fields of `SamplingParams`: temperature and bounds."""
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to go on with."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    may_call: bool
    """Tool calls are wanted as such; otherwise they are text like any other."""
    must_call: bool
    """The reply has to be a call."""
    called_tool: str | None
    """The tool that it has to call, where it has to be this one."""
    json_schema: Mapping[str, Any] | None
    """What the reply has to be, calls aside; None: any text."""
    sampling: Sampling
    raw: Mapping[str, Any]
    """The request in the form of `/v1/chat/completions`."""
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    id: str = field(default_factory=_new_id)
    created: int = field(default_factory=_now)


@dataclass(frozen=True)
class CompletionRequest:
    """A text to go on with."""

    model: str
    prompt: str | tuple[int, ...]
    sampling: Sampling
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    id: str = field(default_factory=_new_id)
    created: int = field(default_factory=_now)


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Read the body of `/v1/chat/completions`.

    Raises:
        Refusal: it is malformed, or asks for what cannot be had.
    """
    parsed = _parse(_ChatBody, body)
    _refuse_unless(not parsed.top_logprobs, "top_logprobs", "alternatives are not kept; use 0")
    tools = tuple(_read_tool(tool, i) for i, tool in enumerate(parsed.tools or ()))
    must_call, called_tool = _forced(parsed.tool_choice, [t["function"]["name"] for t in tools])
    return ChatRequest(
        model=parsed.model,
        messages=tuple(read_message(raw, i) for i, raw in enumerate(parsed.messages)),
        tools=tools,
        may_call=bool(tools) and parsed.tool_choice != "none",
        must_call=must_call,
        called_tool=called_tool,
        json_schema=_json_schema(parsed.response_format),
        sampling=_sampling(parsed, parsed.max_completion_tokens or parsed.max_tokens),
        raw=body,
        logprobs=bool(parsed.logprobs),
        stream=parsed.stream,
        include_usage=bool(parsed.stream_options and parsed.stream_options.include_usage),
    )


def read_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Read the body of `/v1/completions`.

    Raises:
        Refusal: it is malformed, or asks for what cannot be had.
    """
    parsed = _parse(_CompletionBody, body)
    _refuse_unless(not parsed.echo, "echo", "the prompt is not repeated; use false")
    _refuse_unless(parsed.best_of in (None, 1), "best_of", "use 1")
    _refuse_unless(parsed.suffix is None, "suffix", "text is only added at the end")
    _refuse_unless((parsed.logprobs or 0) <= 1, "logprobs", "alternatives are not kept; use 1")
    prompt = parsed.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    is_ids = isinstance(prompt, list) and all(type(id_) is int for id_ in prompt)
    _refuse_unless(
        bool(prompt) and (is_ids or isinstance(prompt, str)),
        "prompt",
        "one text, or one list of token ids",
    )
    return CompletionRequest(
        model=parsed.model,
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        sampling=_sampling(parsed, parsed.max_tokens),
        logprobs=parsed.logprobs is not None,
        stream=parsed.stream,
        include_usage=bool(parsed.stream_options and parsed.stream_options.include_usage),
    )


def _sampling(parsed: _Body, max_tokens: int | None) -> Sampling:
    _refuse_unless(parsed.n in (None, 1), "n", "has to be 1; make several calls instead")
    stop = (parsed.stop,) if isinstance(parsed.stop, str) else tuple(parsed.stop or ())
    _refuse_unless(
        len(stop) <= MAX_STOPS and all(stop),
        "stop",
        f"at most {MAX_STOPS} texts, none of them empty",
    )
    values = {name: getattr(parsed, name) for name in _SAMPLING}
    return Sampling(
        params={name: value for name, value in values.items() if value is not None},
        max_tokens=max_tokens,
        seed=parsed.seed,
        stop=stop,
    )


def _forced(
    choice: str | Mapping[str, Any] | None, names: Sequence[str]
) -> tuple[bool, str | None]:
    """Return whether a tool has to be called, and which one if it is certain."""
    if choice in (None, "auto", "none"):
        return False, None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)  # `/v1/responses` has the name beside the type
        name = function.get("name") if isinstance(function, Mapping) else None
        _refuse_unless(name in names, "tool_choice", f"there is no tool {name!r} among the tools")
        return True, name
    _refuse_unless(
        choice in ("required", "any"), "tool_choice", "say none, auto, required or a function"
    )
    _refuse_unless(bool(names), "tool_choice", "there are no tools of which one could be called")
    return True, names[0] if len(names) == 1 else None


def _json_schema(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the schema that a reply has to follow, if it has to follow any."""
    kind = (response_format or {}).get("type", "text")
    if kind == "text" or response_format is None:
        return None
    if kind == "json_object":
        return {"type": "object"}
    _refuse_unless(
        kind == "json_schema",
        "response_format",
        f"there is no type {kind!r}; say text, json_object or json_schema",
    )
    inner = response_format.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    param = "response_format.json_schema.schema"
    _refuse_unless(isinstance(schema, dict), param, "has to be a JSON schema, an object")
    assert isinstance(schema, dict)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        place = "/".join(map(str, error.absolute_path))
        raise unusable_schema(f"{place or 'the schema'}: {error.message}") from None
    return schema


def unusable_schema(why: str) -> Refusal:
    """Return the answer to a request whose schema no reply can be held to."""
    param = "response_format"
    return Refusal(f"{param}: {why}", code="invalid_json_schema", param=param)


def _read_tool(tool: Mapping[str, Any], position: int) -> dict[str, Any]:
    function = tool.get("function")
    _refuse_unless(
        tool.get("type", "function") == "function"
        and isinstance(function, dict)
        and isinstance(function.get("name"), str),
        f"tools[{position}]",
        "only functions with a name can be shown to the policy",
    )
    assert isinstance(function, dict)
    # What else stands there (`strict`) is for the provider, not for the model.
    shown = {key: function[key] for key in _TOOL_KEYS if function.get(key) is not None}
    return {"type": "function", "function": shown}


def _parse(kind: type[_Parsed], body: Mapping[str, Any]) -> _Parsed:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or "body"
        raise Refusal(f"{param}: {first['msg']}", param=param) from None


def _refuse_unless(fine: bool, param: str, message: str) -> None:
    if not fine:
        raise Refusal(f"{param}: {message}", code="unsupported_value", param=param)
