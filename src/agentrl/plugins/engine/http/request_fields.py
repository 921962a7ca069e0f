"""The fields of `/generate`: their types, their bounds, and the schema derived from both."""

import math
from collections.abc import Callable
from typing import NamedTuple, get_args

from agentrl.inference.openapi import Schema
from agentrl.inference.wire import MAX_INT32, MAX_SEED, MIN_REPETITION_PENALTY, MIN_SEED
from agentrl.schema.grammar import GrammarKind


def is_int(value: object) -> bool:
    """Return whether a value is an integer; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def is_text(value: object) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def is_ints(value: object) -> bool:
    """Return whether a value is a list of integers."""
    # Comparing types this way runs in C, which is fast for long prompts.
    return isinstance(value, list) and set(map(type, value)) <= {int}


def is_texts(value: object) -> bool:
    """Return whether a value is a text or a list of texts."""
    return is_text(value) or (isinstance(value, list) and all(is_text(item) for item in value))


def _is_bias(value: object) -> bool:
    return isinstance(value, dict) and all(_is_number(item) for item in value.values())


def _is_any(_: object) -> bool:
    return True


class _Kind(NamedTuple):
    """A JSON type: its description, check and schema."""

    description: str
    is_valid: Callable[[object], bool]
    schema: Schema


_INTEGER = _Kind("an integer", is_int, {"type": "integer"})
_NUMBER = _Kind("a number", _is_number, {"type": "number"})
_BOOLEAN = _Kind("a boolean", _is_bool, {"type": "boolean"})
_TEXT = _Kind("a string", is_text, {"type": "string"})
_ANYTHING = _Kind("anything", _is_any, {})
_INTEGERS = _Kind("a list of integers", is_ints, {"type": "array", "items": _INTEGER.schema})
_TEXTS = _Kind(
    "a string or a list of strings",
    is_texts,
    {"anyOf": [_TEXT.schema, {"type": "array", "items": _TEXT.schema}]},
)
_BIAS = _Kind(
    "an object of numbers", _is_bias, {"type": "object", "additionalProperties": _NUMBER.schema}
)

SAMPLING_FIELDS: dict[str, _Kind] = {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "n", "top_k"), _INTEGER),
    **dict.fromkeys(("stream_interval", "sampling_seed"), _INTEGER),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), _NUMBER),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), _NUMBER),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "no_stop_trim"), _BOOLEAN),
    "spaces_between_special_tokens": _BOOLEAN,
    "stop": _TEXTS,
    "stop_token_ids": _INTEGERS,
    "logit_bias": _BIAS,
    **dict.fromkeys(get_args(GrammarKind), _TEXT),
    **dict.fromkeys(("choice", "custom_params"), _ANYTHING),
}
BODY_FIELDS: dict[str, _Kind] = {
    **dict.fromkeys(("logprob_start_len", "top_logprobs_num"), _INTEGER),
    "routed_experts_start_len": _INTEGER,
    **dict.fromkeys(("extra_key", "cache_salt"), _TEXT),
    **dict.fromkeys(("stream", "return_logprob", "return_text_in_logprobs"), _BOOLEAN),
    **dict.fromkeys(("return_prompt_token_ids", "return_routed_experts"), _BOOLEAN),
}
# SGLang's documented bounds, or else the limits of the tensors of either server.
RANGES: dict[str, tuple[str, float, float]] = {
    "max_new_tokens": ("at least 0", 0, MAX_INT32),
    "min_new_tokens": ("at least 0", 0, MAX_INT32),
    "n": ("at least 1", 1, MAX_INT32),
    "stream_interval": ("at least 1", 1, MAX_INT32),
    "temperature": ("in [0, 1000000]", 0, 1e6),
    "top_p": ("in (0, 1]", math.nextafter(0.0, 1.0), 1),
    "top_k": (f"-1 or in [1, {MAX_INT32}]", -1, MAX_INT32),
    "min_p": ("in [0, 1]", 0, 1),
    "frequency_penalty": ("in [-2, 2]", -2, 2),
    "presence_penalty": ("in [-2, 2]", -2, 2),
    "repetition_penalty": (f"in [{MIN_REPETITION_PENALTY:g}, 2]", MIN_REPETITION_PENALTY, 2),
    "sampling_seed": ("a signed integer of 64 bits", MIN_SEED, MAX_SEED),
}


def generate_schema() -> Schema:
    """Return the schema of a body of `/generate`, from the tables that it is checked against."""
    sampling = {
        name: _or_null(kind.schema | _bounds(name)) for name, kind in SAMPLING_FIELDS.items()
    }
    parameters = {"type": "object", "properties": sampling, "additionalProperties": False}
    ids = {"anyOf": [_INTEGERS.schema, {"type": "array", "items": _INTEGERS.schema}]}
    return {
        "type": "object",
        "properties": {
            "input_ids": _or_null(ids),
            **dict.fromkeys(("text", "image_data"), _or_null(_TEXTS.schema)),
            "sampling_params": {
                "anyOf": [parameters, {"type": "array", "items": parameters}, {"type": "null"}]
            },
            **dict.fromkeys(("rid", "lora_path"), _or_null(_TEXTS.schema)),
            **{name: kind.schema for name, kind in BODY_FIELDS.items()},
        },
    }


def _bounds(name: str) -> Schema:
    if name not in RANGES:
        return {}
    _, low, high = RANGES[name]
    return {"minimum": low, "maximum": high}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}
