"""Bodies of requests as models, and the sequences that a body of `/generate` asks for.

Types are strict, as SGLang's are. Unknown fields of a body are ignored; unknown sampling parameters
are refused. All functions here raise `InvalidRequest` or a subclass for what is invalid.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeVar, cast, get_args

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from agentrl.data.shown_images import PlacedImage
from agentrl.inference.wire import (
    MAX_GRAMMAR_CHARS,
    MAX_INT32,
    MAX_SEED,
    MIN_REPETITION_PENALTY,
    MIN_SEED,
    new_rid,
)
from agentrl.plugins.engine.generation.grammars import GrammarConstraint
from agentrl.plugins.engine.generation.token_sequence import (
    LOWEST_PRIORITY,
    DrawParams,
    TokenSequence,
)
from agentrl.plugins.engine.http.http_errors import InvalidField, InvalidParameter, InvalidRequest
from agentrl.plugins.engine.weights.lora_adapters import Adapter
from agentrl.schema.grammar import Grammar, GrammarKind

ShowImages = Callable[[Sequence[int], Sequence[str]], tuple[np.ndarray, tuple[PlacedImage, ...]]]
"""Inserts images, given as `data:` URLs, at a prompt's placeholders."""

_UNSUPPORTED_PARAMETERS = ("stop_regex", "beam_width", "watermark")
_UNSUPPORTED_FIELDS = {
    "input_embeds": "send input_ids",
    **dict.fromkeys(("video_data", "audio_data"), "this engine reads text and images"),
    "token_ids_logprob": "logprobs are those of the sampled tokens",
}
_MAX_ID_CHARS = 256
_MAX_STOPS = 32
_MAX_STOP_CHARS = 1024
_MAX_BIAS = 1e9
"""Larger biases overflow when divided by a temperature."""
_MAX_SEQUENCES = 1024
_DRAWN = {
    *("temperature", "top_p", "top_k", "min_p", "min_new_tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
}
"""Parameters that `DrawParams` has under the same names and with the same defaults."""


def _checked_bias(value: Any) -> Any:
    """Stop at the first bias that is wrong, for a body may have 100,000 of them."""
    for key, bias in value.items() if isinstance(value, dict) else ():
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise InvalidParameter("sampling_params.logit_bias must be an object of numbers")
        # The length is checked because Python does not parse integers with thousands of digits.
        if not (key.isdecimal() and len(key) < 20):
            raise InvalidRequest(f"logit_bias: {key[:20]} is not a token id")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise InvalidRequest(f"logit_bias must be in [{-_MAX_BIAS:g}, {_MAX_BIAS:g}]")
    return value


def _checked_top_k(value: int) -> int:
    if value == 0:
        raise InvalidRequest(f"top_k must be -1 or in [1, {MAX_INT32}], got 0")
    return value


_TopK = Annotated[int, Field(ge=-1, le=MAX_INT32), AfterValidator(_checked_top_k)]
_Integers = Annotated[list[int], Field(fail_fast=True)]
_Texts = str | Annotated[list[str], Field(fail_fast=True)]
_Count = Annotated[int, Field(ge=0, le=MAX_INT32)]
_Positive = Annotated[int, Field(ge=1, le=MAX_INT32)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_OneEach = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}},
            {"type": "null"},
        ]
    }
)
"""A text, or one for each prompt; what is in a list is checked when the prompts are counted."""


class Body(BaseModel):
    """The JSON object of a request. Null is as good as nothing, except for `NOT_NULL`."""

    model_config = ConfigDict(strict=True, extra="ignore")
    NOT_NULL: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: v for name, v in body.items() if v is not None or name in cls.NOT_NULL}


class SamplingParameters(Body):
    """The `sampling_params`, within SGLang's documented bounds or those of the tensors."""

    model_config = ConfigDict(extra="forbid")
    NOT_NULL = frozenset({"max_new_tokens"})

    max_new_tokens: _Count | None = 128
    """None: all that fits."""
    min_new_tokens: _Count | None = None
    n: _Positive | None = None
    top_k: _TopK | None = None
    stream_interval: _Positive | None = None
    sampling_seed: Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: _Share | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=2)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stop: _Texts | None = None
    stop_token_ids: _Integers | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_checked_bias)] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    choice: Any = None
    custom_params: Any = None

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name in value.keys() - cls.model_fields.keys():
            if name not in _UNSUPPORTED_PARAMETERS:
                raise InvalidParameter(f"sampling_params.{name} is not a known parameter")
            if value[name] is not None:
                raise InvalidRequest(f"sampling_params.{name} is not supported here")
        return value

    @property
    def grammars(self) -> list[Grammar]:
        """The grammars that a reply is to follow; more than one are refused."""
        given = ((kind, getattr(self, kind)) for kind in get_args(GrammarKind))
        return [Grammar(kind=kind, text=text) for kind, text in given if text]


_ParametersOfEach = Annotated[list[SamplingParameters], Field(fail_fast=True)]


class GenerationBody(Body):
    """The body of `/generate`."""

    NOT_NULL = frozenset({"stream", "return_text_in_logprobs", "return_prompt_token_ids"})

    input_ids: _Integers | Annotated[list[_Integers], Field(fail_fast=True)] | None = None
    """Takes precedence over `text`."""
    text: _Texts | None = None
    image_data: Annotated[Any, _OneEach] = None
    sampling_params: SamplingParameters | _ParametersOfEach | None = None
    rid: _Texts | None = None
    lora_path: Annotated[Any, _OneEach] = None
    logprob_start_len: int = -1
    """-1: logprobs of the output only."""
    top_logprobs_num: int = 0
    routed_experts_start_len: int = 0
    priority: int = LOWEST_PRIORITY
    extra_key: str = ""
    cache_salt: str = ""
    stream: bool = False
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    return_routed_experts: bool = False

    @model_validator(mode="before")
    @classmethod
    def _only_supported(cls, body: Any) -> Any:
        for name, instead in _UNSUPPORTED_FIELDS.items():
            if body.get(name):
                raise InvalidRequest(f"{name} is not supported here; {instead}")
        for name in ("input_ids", "text", "sampling_params"):  # before each is looked into
            value = body.get(name)
            if isinstance(value, list) and value and not isinstance(value[0], int):
                _check_count(len(value), _MAX_SEQUENCES)
        return body

    @property
    def samplings(self) -> list[SamplingParameters]:
        """The parameters, once or for each prompt."""
        if self.sampling_params is None:
            return [SamplingParameters()]
        given = self.sampling_params
        return given if isinstance(given, list) else [given]

    @property
    def is_quick(self) -> bool:
        """Whether it has token ids, and neither text nor images nor a grammar."""
        is_tokens = self.input_ids is not None and not self.image_data
        return is_tokens and not any(sampling.grammars for sampling in self.samplings)


_ONE_EACH = "sampling_params must be an object, or a list of objects, one for each prompt"
_AnyBody = TypeVar("_AnyBody", bound=Body)


def read_body(kind: type[_AnyBody], body: Mapping[str, Any]) -> _AnyBody:
    """Return a body as a model of its fields; the message of a refusal names the first bad one."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        # Of the alternatives of a field, the one that was followed furthest is meant.
        worst = max(error.errors(include_url=False), key=lambda found: len(found["loc"]))
        is_parameter = not SamplingParameters.model_fields.keys().isdisjoint(worst["loc"])
        # SGLang takes a number for a flag as a wrong parameter, wherever it stands.
        is_number = worst["type"] == "bool_type" and worst["input"] in (0, 1)
        refused: type[InvalidRequest] = InvalidField
        if kind is GenerationBody and (is_parameter or is_number):
            refused = InvalidRequest if "than" in worst["type"] else InvalidParameter
        names = kind.model_fields.keys() | SamplingParameters.model_fields.keys()
        path = ".".join(str(part) for part in worst["loc"] if part in names or type(part) is int)
        raise refused(f"{path}: {worst['msg']}") from None


@dataclass(frozen=True)
class ModelLimits:
    """What requests are checked against."""

    context_length: int
    vocab_size: int
    eos_ids: frozenset[int]
    has_experts: bool = False
    max_sequences: int = _MAX_SEQUENCES
    """Sequences that one request may ask for."""
    max_text_chars: int = 1 << 20
    """Most characters of a prompt that can fit into the context; 0 without a tokenizer."""


@dataclass(frozen=True)
class ParsedRequest:
    """A checked request for one or several sequences."""

    sequences: tuple[TokenSequence, ...]
    is_batch: bool
    """Whether the answer is a list."""
    body: GenerationBody
    sampling: SamplingParameters
    """Those of the first prompt, which decide how answers are written."""


def parse_generate(
    body: GenerationBody,
    limits: ModelLimits,
    *,
    encode: Callable[[str], list[int]],
    show: ShowImages,
    new_seed: Callable[[], int],
    adapters: Mapping[str, Adapter],
    constrain: Callable[[Grammar], GrammarConstraint],
) -> ParsedRequest:
    """Check a request against the model, and make its sequences.

    `encode`, `show` and `constrain` raise `InvalidRequest` if the model lacks what they need, and
    `constrain` a `ValueError` for a malformed grammar. `new_seed` is for sequences without a seed.
    """
    prompts, is_batch = _prompts(body, limits, encode)
    if body.top_logprobs_num:
        raise InvalidRequest("top_logprobs_num is not supported here; use 0")
    _check_experts(body, prompts, limits)
    samplings = body.samplings
    if not isinstance(body.sampling_params, list):
        samplings *= len(prompts)
    if len(samplings) != len(prompts):
        raise InvalidField(_ONE_EACH)
    sequences: list[TokenSequence] = []
    rids = _rids(body.rid, len(prompts), is_batch)
    request_adapters = _adapters(body.lora_path, len(prompts), adapters)
    _check_count(sum(sampling.n or 1 for sampling in samplings), limits.max_sequences)
    images = _images(body.image_data, len(prompts), is_batch)
    for prompt_ids, urls, sampling, rid, adapter in zip(
        prompts, images, samplings, rids, request_adapters, strict=True
    ):
        _check_prompt(prompt_ids, limits)
        prompt, placed = show(prompt_ids, urls)
        if placed:
            _check_prompt(prompt.tolist(), limits)
        if body.return_logprob and body.logprob_start_len > len(prompt):
            raise InvalidRequest("logprob_start_len is beyond the end of the prompt")
        params = _draw_params(sampling, len(prompt), limits, new_seed)
        constraint = _constraint(sampling, constrain)
        keys = [body.extra_key, body.cache_salt, *([adapter.namespace] if adapter else [])]
        count = sampling.n or 1
        sequences.extend(
            TokenSequence.start(
                rid if count == 1 else new_rid(),
                prompt,
                replace(params, seed=params.seed + number),
                namespace="\0".join(keys),
                adapter=adapter,
                stream=body.stream,
                constraint=None if constraint is None else constraint.fresh(),
                prompt_logprobs_from=body.logprob_start_len if body.return_logprob else -1,
            ).showing(placed)
            for number in range(count)
        )
    for sequence in sequences:
        sequence.priority = body.priority
    return ParsedRequest(tuple(sequences), is_batch or len(sequences) > 1, body, samplings[0])


def _prompts(
    body: GenerationBody, limits: ModelLimits, encode: Callable[[str], list[int]]
) -> tuple[list[list[int]], bool]:
    ids, text = body.input_ids, body.text
    if ids is not None:
        if not ids or isinstance(ids[0], int):
            return [cast(list[int], ids)], False
        _check_count(len(ids), limits.max_sequences)
        return ids, True
    if text is None:
        raise InvalidRequest("input_ids or text must be given")
    texts = [text] if isinstance(text, str) else text
    _check_count(len(texts), limits.max_sequences)
    longest = max(map(len, texts))
    if 0 < limits.max_text_chars < longest:
        raise InvalidRequest(
            f"the text has {longest} characters; the context of {limits.context_length} tokens "
            f"holds at most {limits.max_text_chars}"
        )
    return [encode(item) for item in texts], not isinstance(text, str)


def _images(value: Any, count: int, is_batch: bool) -> list[list[str]]:
    """Return the URLs of each prompt's images."""
    if not value:
        return [[] for _ in range(count)]
    entries: list[Any] = value if is_batch and isinstance(value, list) else [value]
    urls: list[Any] = [[item] if isinstance(item, str) else item or [] for item in entries]
    if len(urls) != count or not all(isinstance(item, list) and _are_texts(item) for item in urls):
        raise InvalidField(
            "image_data must be a data: URL or a list of them; for several prompts, a list of "
            "such lists, one for each prompt"
        )
    return urls


def _are_texts(items: list[Any]) -> bool:
    return all(isinstance(item, str) for item in items)


def _check_count(count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise InvalidRequest(f"a request may ask for 1 to {most} sequences, not {count}")


def _check_experts(body: GenerationBody, prompts: list[list[int]], limits: ModelLimits) -> None:
    if not body.return_routed_experts:
        return
    if not limits.has_experts:
        raise InvalidRequest("return_routed_experts: the model has no experts")
    if not 0 <= body.routed_experts_start_len <= min(map(len, prompts)):
        raise InvalidRequest("routed_experts_start_len must be in [0, number of prompt tokens]")


def _rids(value: str | list[str] | None, count: int, is_batch: bool) -> list[str]:
    if value is None:
        return [new_rid() for _ in range(count)]
    rids = [value] if isinstance(value, str) else value
    if any(len(rid) > _MAX_ID_CHARS for rid in rids):
        raise InvalidRequest(f"rid has at most {_MAX_ID_CHARS} characters")
    if isinstance(value, str):
        return [f"{value}_{number}" for number in range(count)] if is_batch else [value]
    if len(rids) != count:
        raise InvalidField("rid must be a string, or a list of strings, one for each prompt")
    if len(set(rids)) < count:
        raise InvalidRequest("rid contains the same id twice")
    return rids


def _adapters(value: Any, count: int, loaded: Mapping[str, Adapter]) -> list[Adapter | None]:
    names: list[Any] = value if isinstance(value, list) else [value] * count
    if len(names) != count or not all(name is None or isinstance(name, str) for name in names):
        raise InvalidField("lora_path must be a string, or a list of strings, one for each prompt")
    for name in names:
        if name and name not in loaded:
            raise InvalidRequest(
                f"the LoRA adapter {name} is not loaded; loaded are: {', '.join(loaded) or 'none'}"
            )
    return [loaded[name] if name else None for name in names]


def _check_prompt(prompt: list[int], limits: ModelLimits) -> None:
    if not prompt:
        raise InvalidRequest("the prompt is empty")
    if len(prompt) >= limits.context_length:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens, the context is {limits.context_length} tokens"
        )
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        raise InvalidRequest(f"token ids must be in [0, {limits.vocab_size})")


def _draw_params(
    sampling: SamplingParameters, num_prompt: int, limits: ModelLimits, new_seed: Callable[[], int]
) -> DrawParams:
    """Return how to draw; refuse what contradicts the model's limits or one another."""
    free_tokens = limits.context_length - num_prompt
    max_new = free_tokens if sampling.max_new_tokens is None else sampling.max_new_tokens
    if max_new > free_tokens:
        raise InvalidRequest(
            f"{num_prompt} prompt tokens and max_new_tokens {max_new} are more than the "
            f"context of {limits.context_length} tokens"
        )
    min_new = sampling.min_new_tokens or 0
    if min_new > max_new:
        raise InvalidRequest(f"min_new_tokens {min_new} is more than max_new_tokens {max_new}")
    stop_ids = frozenset(sampling.stop_token_ids or ())
    # A minimum length masks these ids, so they must exist. Otherwise, ids beyond the vocabulary are
    # harmless, because they are never drawn.
    num_ids = limits.vocab_size if min_new else MAX_INT32
    if stop_ids and not 0 <= min(stop_ids) <= max(stop_ids) < num_ids:
        raise InvalidRequest(f"stop_token_ids must be in [0, {num_ids})")
    bias = {int(key): number for key, number in (sampling.logit_bias or {}).items()}
    if bias and max(bias) >= limits.vocab_size:
        raise InvalidRequest(f"logit_bias: {max(bias)} is not a token id")
    seed = sampling.sampling_seed
    return DrawParams(
        max_new_tokens=max_new,
        stop_ids=stop_ids if sampling.ignore_eos else stop_ids | limits.eos_ids,
        stop_strings=_stops([] if sampling.stop is None else sampling.stop),
        logit_bias=bias,
        seed=new_seed() if seed is None else seed,
        **sampling.model_dump(include=_DRAWN, exclude_none=True),
    )


def _stops(value: str | list[str]) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(value)
    if len(stops) > _MAX_STOPS or not all(0 < len(text) <= _MAX_STOP_CHARS for text in stops):
        raise InvalidRequest(
            f"stop takes up to {_MAX_STOPS} texts of 1 to {_MAX_STOP_CHARS} characters"
        )
    return stops


def _constraint(
    sampling: SamplingParameters, constrain: Callable[[Grammar], GrammarConstraint]
) -> GrammarConstraint | None:
    grammars = sampling.grammars
    if not grammars:
        return None
    if len(grammars) > 1:
        raise InvalidRequest(f"only one of {', '.join(get_args(GrammarKind))} can be given")
    if sampling.min_new_tokens:
        raise InvalidRequest(
            "min_new_tokens: not supported together with a grammar, which decides where a reply "
            "may end"
        )
    if len(grammars[0].text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"the {grammars[0].kind} has {len(grammars[0].text)} characters, at most "
            f"{MAX_GRAMMAR_CHARS} are compiled"
        )
    try:
        return constrain(grammars[0])
    except ValueError as error:
        raise InvalidRequest(f"Failed to compile the {grammars[0].kind}: {error}") from error
