"""Requests of `/generate`: strict about types and parameters, as SGLang is.

Unknown top-level keys are ignored; `sampling_parsing` reads the sampling parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from agentrl.data.shown_images import PlacedImage
from agentrl.inference.wire import new_rid
from agentrl.plugins.engine.generation.grammars import GrammarConstraint
from agentrl.plugins.engine.generation.token_sequence import TokenSequence
from agentrl.plugins.engine.http.http_errors import (
    InvalidField,
    InvalidParameter,
    InvalidRequest,
)
from agentrl.plugins.engine.http.request_fields import (
    BODY_FIELDS,
    is_ints,
    is_text,
    is_texts,
)
from agentrl.plugins.engine.http.sampling_parsing import (
    ModelLimits,
    draw_params,
    grammar_constraint,
    sampling_of_prompts,
)
from agentrl.plugins.engine.weights.lora_adapters import Adapter
from agentrl.schema.grammar import Grammar, GrammarKind

ShowImages = Callable[[Sequence[int], Sequence[str]], tuple[np.ndarray, tuple[PlacedImage, ...]]]
"""Inserts images, given as `data:` URLs, at a prompt's placeholders."""


@dataclass(frozen=True)
class ParsedRequest:
    """A checked request for one or several sequences."""

    sequences: tuple[TokenSequence, ...]
    is_batch: bool
    """Whether the answer is a list."""
    stream: bool
    stream_interval: int
    """Tokens between two frames of a stream."""
    return_logprob: bool
    logprob_start_len: int
    """-1: logprobs of the output only."""
    return_text_in_logprobs: bool
    return_prompt_token_ids: bool
    routed_from: int | None
    """Position of the first token whose experts are requested; None: none."""
    skip_special_tokens: bool
    no_stop_trim: bool


_MAX_ID_CHARS = 256


def is_quick(body: Mapping[str, Any]) -> bool:
    """Return whether a request has token ids, and neither text nor images nor a grammar."""
    samplings = body.get("sampling_params") or {}
    all_parameters = samplings if isinstance(samplings, list) else [samplings]
    if body.get("input_ids") is None or body.get("image_data"):
        return False
    return not any(
        isinstance(sampling, dict) and sampling.keys() & set(get_args(GrammarKind))
        for sampling in all_parameters
    )


def parse_generate(
    body: Mapping[str, Any],
    limits: ModelLimits,
    *,
    encode: Callable[[str], list[int]],
    show: ShowImages,
    new_seed: Callable[[], int],
    adapters: Mapping[str, Adapter],
    constrain: Callable[[Grammar], GrammarConstraint],
) -> ParsedRequest:
    """Check a request and make its sequences.

    Args:
        body: the decoded JSON object.
        limits: what the model allows.
        encode: converts text to token ids; raises `InvalidRequest` without a tokenizer.
        show: inserts images into prompts; raises `InvalidRequest` if the model reads none.
        new_seed: returns seeds for sequences without one.
        adapters: the loaded adapters, by name.
        constrain: compiles a grammar; raises `InvalidRequest` without a tokenizer, and `ValueError`
            if the grammar is malformed.

    Raises:
        InvalidRequest: the message names the problem.
    """
    prompts, is_batch = _prompts(body, limits, encode)
    logprob_start = _field(body, "logprob_start_len", -1)
    if _field(body, "top_logprobs_num", 0) or body.get("token_ids_logprob"):
        raise InvalidRequest("top_logprobs_num and token_ids_logprob are not supported here")
    routed_from = _routed_from(body, prompts, limits)
    stream = _flag(body, "stream", allows_null=False)
    return_logprob = _flag(body, "return_logprob")
    keys = [_field(body, name, "") for name in ("extra_key", "cache_salt")]
    request_adapters = _adapters(body.get("lora_path"), len(prompts), adapters)
    samplings = sampling_of_prompts(body.get("sampling_params"), len(prompts))
    first = samplings[0]
    sequences: list[TokenSequence] = []
    rids = _rids(body.get("rid"), len(prompts), is_batch)
    _check_count(sum(sampling.get("n") or 1 for sampling in samplings), limits)
    images = _images(body.get("image_data"), len(prompts), is_batch)
    for prompt_ids, urls, sampling, rid, adapter in zip(
        prompts, images, samplings, rids, request_adapters, strict=True
    ):
        _check_prompt(prompt_ids, limits)
        prompt, placed = show(prompt_ids, urls)
        if placed:
            _check_prompt(prompt.tolist(), limits)
        if return_logprob and logprob_start > len(prompt):
            raise InvalidRequest("logprob_start_len is beyond the end of the prompt")
        params, count = draw_params(sampling, len(prompt), limits, new_seed)
        constraint = grammar_constraint(sampling, constrain)
        for number in range(count):
            seeded = replace(params, seed=params.seed + number)
            sequences.append(
                TokenSequence.start(
                    rid if count == 1 else new_rid(),
                    prompt,
                    seeded,
                    namespace="\0".join([*keys, adapter.namespace] if adapter else keys),
                    adapter=adapter,
                    stream=stream,
                    constraint=None if constraint is None else constraint.fresh(),
                    prompt_logprobs_from=logprob_start if return_logprob else -1,
                ).showing(placed)
            )
    return ParsedRequest(
        sequences=tuple(sequences),
        is_batch=is_batch or len(sequences) > 1,
        stream=stream,
        stream_interval=first.get("stream_interval") or 1,
        return_logprob=return_logprob,
        logprob_start_len=logprob_start,
        return_text_in_logprobs=_flag(body, "return_text_in_logprobs", allows_null=False),
        return_prompt_token_ids=_flag(body, "return_prompt_token_ids", allows_null=False),
        routed_from=routed_from,
        skip_special_tokens=first.get("skip_special_tokens") is not False,
        no_stop_trim=first.get("no_stop_trim") is True,
    )


def _prompts(
    body: Mapping[str, Any], limits: ModelLimits, encode: Callable[[str], list[int]]
) -> tuple[list[list[int]], bool]:
    if body.get("input_embeds") is not None:
        raise InvalidRequest("input_embeds is not supported here; send input_ids")
    for name in ("video_data", "audio_data"):
        if body.get(name):
            raise InvalidRequest(f"{name} is not supported: this engine reads text and images")
    text = body.get("text")
    if text is not None and not is_texts(text):
        raise InvalidField("text must be a string or a list of strings")
    ids = body.get("input_ids")
    if ids is not None:  # it takes precedence if both are given
        if is_ints(ids):
            return [ids], False
        if isinstance(ids, list) and all(is_ints(item) for item in ids):
            _check_count(len(ids), limits)
            return ids, True
        raise InvalidField("input_ids must be a list of integers or a list of such lists")
    if text is None:
        raise InvalidRequest("input_ids or text must be given")
    texts = [text] if isinstance(text, str) else text
    _check_count(len(texts), limits)
    longest = max(map(len, texts))
    if 0 < limits.max_text_chars < longest:
        raise InvalidRequest(
            f"the text has {longest} characters; the context of {limits.context_length} tokens "
            f"holds at most {limits.max_text_chars}"
        )
    return [encode(item) for item in texts], not isinstance(text, str)


def _images(value: object, count: int, is_batch: bool) -> list[list[str]]:
    """Return the URLs of each prompt's images."""
    if not value:
        return [[] for _ in range(count)]
    entries: list[Any] = value if is_batch and isinstance(value, list) else [value]
    urls: list[Any] = [[item] if isinstance(item, str) else item or [] for item in entries]
    if len(urls) != count or not all(
        isinstance(item, list) and all(map(is_text, item)) for item in urls
    ):
        raise InvalidField(
            "image_data must be a data: URL or a list of them; for several prompts, a list of "
            "such lists, one for each prompt"
        )
    return urls


def _check_count(count: int, limits: ModelLimits) -> None:
    if not 1 <= count <= limits.max_sequences:
        raise InvalidRequest(
            f"a request may ask for 1 to {limits.max_sequences} sequences, not {count}"
        )


def _routed_from(
    body: Mapping[str, Any], prompts: list[list[int]], limits: ModelLimits
) -> int | None:
    start: int = _field(body, "routed_experts_start_len", 0)
    if not _flag(body, "return_routed_experts"):
        return None
    if not limits.has_experts:
        raise InvalidRequest("return_routed_experts: the model has no experts")
    if not 0 <= start <= min(map(len, prompts)):
        raise InvalidRequest("routed_experts_start_len must be in [0, number of prompt tokens]")
    return start


def _rids(value: object, count: int, is_batch: bool) -> list[str]:
    if value is None:
        return [new_rid() for _ in range(count)]
    rids = value if isinstance(value, list) else [value]
    if any(isinstance(rid, str) and len(rid) > _MAX_ID_CHARS for rid in rids):
        raise InvalidRequest(f"rid has at most {_MAX_ID_CHARS} characters")
    if isinstance(value, str):
        return [f"{value}_{number}" for number in range(count)] if is_batch else [value]
    if isinstance(value, list) and len(value) == count and all(map(is_text, value)):
        if len(set(value)) < count:
            raise InvalidRequest("rid contains the same id twice")
        return value
    raise InvalidField("rid must be a string, or a list of strings, one for each prompt")


def _adapters(value: object, count: int, loaded: Mapping[str, Adapter]) -> list[Adapter | None]:
    names: list[Any] = value if isinstance(value, list) else [value] * count
    if len(names) != count or not all(name is None or is_text(name) for name in names):
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


def _field(body: Mapping[str, Any], name: str, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not BODY_FIELDS[name].is_valid(value):
        raise InvalidField(f"{name} has the wrong type")
    return value


def _flag(body: Mapping[str, Any], name: str, *, allows_null: bool = True) -> bool:
    value = body.get(name, False)
    if value is None and allows_null:
        return False
    if not isinstance(value, bool):
        error = InvalidParameter if value in (0, 1) else InvalidField
        raise error(f"{name} must be a boolean")
    return value
