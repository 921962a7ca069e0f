"""Reads the sampling parameters of a request.

Input: the `sampling_params` of a body, types unchecked. Output: `DrawParams`, the number of
sequences and a compiled grammar. Unknown parameters are refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from agentrl.inference.wire import MAX_GRAMMAR_CHARS, MAX_INT32
from agentrl.plugins.engine.generation.grammars import GrammarConstraint
from agentrl.plugins.engine.generation.token_sequence import DrawParams
from agentrl.plugins.engine.http.http_errors import (
    InvalidField,
    InvalidParameter,
    InvalidRequest,
)
from agentrl.plugins.engine.http.request_fields import RANGES, SAMPLING_FIELDS
from agentrl.schema.grammar import Grammar, GrammarKind

DEFAULT_NEW_TOKENS = 128
_UNSUPPORTED = ("stop_regex", "beam_width", "watermark")
_MAX_STOPS = 32
_MAX_STOP_CHARS = 1024
_MAX_BIAS = 1e9
"""Larger biases overflow when divided by a temperature."""


@dataclass(frozen=True)
class ModelLimits:
    """What requests are checked against."""

    context_length: int
    vocab_size: int
    eos_ids: frozenset[int]
    has_experts: bool = False
    max_sequences: int = 1024
    """Sequences that one request may ask for."""
    max_text_chars: int = 1 << 20
    """Most characters of a prompt that can fit into the context; 0 without a tokenizer."""


def sampling_of_prompts(value: object, count: int) -> list[Mapping[str, Any]]:
    """Return the checked parameters of each prompt.

    Raises:
        InvalidRequest: the message names the problem.
    """
    if value is None:
        return [{}] * count
    if isinstance(value, dict):
        return [_checked_sampling(value)] * count
    if isinstance(value, list) and len(value) == count:
        return [_checked_sampling(item) for item in value]
    raise InvalidField(
        "sampling_params must be an object, or a list of objects, one for each prompt"
    )


def _checked_sampling(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidField("sampling_params must be an object")
    for name, item in value.items():
        if name in _UNSUPPORTED:
            if item is not None:
                raise InvalidRequest(f"sampling_params.{name} is not supported here")
            continue
        if name not in SAMPLING_FIELDS:
            raise InvalidParameter(f"sampling_params.{name} is not a known parameter")
        kind = SAMPLING_FIELDS[name]
        if item is not None and not kind.is_valid(item):
            raise InvalidParameter(f"sampling_params.{name} must be {kind.description}")
    for name, (rule, low, high) in RANGES.items():
        item = value.get(name)
        if item is not None and not low <= item <= high:
            raise InvalidRequest(f"{name} must be {rule}, got {item}")
    if value.get("top_k") == 0:
        raise InvalidRequest(f"top_k must be {RANGES['top_k'][0]}, got 0")
    return value


def _stops(value: str | list[str]) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(value)
    if len(stops) > _MAX_STOPS or not all(0 < len(text) <= _MAX_STOP_CHARS for text in stops):
        raise InvalidRequest(
            f"stop takes up to {_MAX_STOPS} texts of 1 to {_MAX_STOP_CHARS} characters"
        )
    return stops


def draw_params(
    sampling: Mapping[str, Any], num_prompt: int, limits: ModelLimits, new_seed: Callable[[], int]
) -> tuple[DrawParams, int]:
    """Return the parameters and the number of sequences to draw with them.

    Raises:
        InvalidRequest: they contradict the model's limits or one another.
    """

    def value_of(name: str, default: Any) -> Any:
        value = sampling.get(name)
        return default if value is None else value

    free_tokens = limits.context_length - num_prompt
    max_new = sampling.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    if max_new is None:  # null, unlike an omitted field, requests all that fits
        max_new = free_tokens
    if max_new > free_tokens:
        raise InvalidRequest(
            f"{num_prompt} prompt tokens and max_new_tokens {max_new} are more than the "
            f"context of {limits.context_length} tokens"
        )
    min_new = value_of("min_new_tokens", 0)
    if min_new > max_new:
        raise InvalidRequest(f"min_new_tokens {min_new} is more than max_new_tokens {max_new}")
    stop_ids = frozenset(value_of("stop_token_ids", ()))
    # A minimum length masks these ids, so they must exist. Otherwise, ids beyond the vocabulary are
    # harmless, because they are never drawn.
    num_ids = limits.vocab_size if min_new else MAX_INT32
    if stop_ids and not 0 <= min(stop_ids) <= max(stop_ids) < num_ids:
        raise InvalidRequest(f"stop_token_ids must be in [0, {num_ids})")
    seed = value_of("sampling_seed", None)
    params = DrawParams(
        max_new_tokens=max_new,
        temperature=float(value_of("temperature", 1.0)),
        top_p=float(value_of("top_p", 1.0)),
        top_k=value_of("top_k", -1),
        min_p=float(value_of("min_p", 0.0)),
        frequency_penalty=float(value_of("frequency_penalty", 0.0)),
        presence_penalty=float(value_of("presence_penalty", 0.0)),
        repetition_penalty=float(value_of("repetition_penalty", 1.0)),
        min_new_tokens=min_new,
        stop_ids=stop_ids if value_of("ignore_eos", False) else stop_ids | limits.eos_ids,
        stop_strings=_stops(value_of("stop", [])),
        logit_bias=_bias(value_of("logit_bias", {}), limits),
        seed=new_seed() if seed is None else seed,
    )
    return params, value_of("n", 1)


def grammar_constraint(
    sampling: Mapping[str, Any], constrain: Callable[[Grammar], GrammarConstraint]
) -> GrammarConstraint | None:
    """Return the constraint for the requested grammar, if any.

    Raises:
        InvalidRequest: there are several grammars, or it cannot be compiled.
    """
    grammars = [Grammar(kind=k, text=sampling[k]) for k in get_args(GrammarKind) if sampling.get(k)]
    if not grammars:
        return None
    if len(grammars) > 1:
        raise InvalidRequest(f"only one of {', '.join(get_args(GrammarKind))} can be given")
    if sampling.get("min_new_tokens"):
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


def _bias(value: Mapping[str, float], limits: ModelLimits) -> dict[int, float]:
    bias = {}
    for key, number in value.items():
        # The length is checked because Python does not parse integers with thousands of digits.
        if not (key.isdecimal() and len(key) < 20 and int(key) < limits.vocab_size):
            raise InvalidRequest(f"logit_bias: {key[:20]} is not a token id")
        if not -_MAX_BIAS <= number <= _MAX_BIAS:
            raise InvalidRequest(f"logit_bias must be in [{-_MAX_BIAS:g}, {_MAX_BIAS:g}]")
        bias[int(key)] = float(number)
    return bias
