"""Requests and results of a generation, and their JSON form in SGLang's `/generate`.

Pure functions between values and JSON objects; nothing is sent here.
"""

import base64
import binascii
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from agentrl.errors import InferenceError, ServerRefused
from agentrl.schema import FinishReason, Logprobs, SamplingParams, TokenIds, VersionSpan
from agentrl.schema.base import Value

STREAM_INTERVAL = 8
"""Tokens between two frames of a stream. Every frame holds all tokens so far."""
START_VERSION = 0
"""Policy version of a label that is not a number (a server's own `default`)."""
MIXED_LABEL = "mixed"
"""Label of a server that has received only part of the new weights."""
MIXED_VERSION = -1
"""Version of that label; no policy has it, and nothing sampled under it is used."""

PauseMode = Literal["abort", "retract", "in_place"]
"""What happens to generations in flight while a server is paused (`weight_sync.server_operations`);
a request without a mode means the first.
"""

MAX_INT32 = 2**31 - 1
"""Largest `top_k` and token id: servers store both in 32-bit tensors."""
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
MAX_GRAMMAR_CHARS = 64_000
"""Limited because compiling takes time and memory, and native code recurses over the grammar."""
MIN_REPETITION_PENALTY = 1e-6
"""Logits are divided by it: in float32, smaller values become 0, and quotients infinite."""


def new_rid() -> str:
    """Return a request id. All have the same length: servers abort by prefix of the id."""
    return uuid.uuid4().hex


class GenerateRequest(Value):
    """A request for one generation."""

    input_ids: TokenIds
    """The prompt, int32 [P]."""
    sampling: SamplingParams
    rid: str = Field(default_factory=new_rid)
    priority: int | None = None
    """Waiting requests with a higher one go first; those without one go last."""
    extra_key: str | None = None
    """Namespace of the server's prefix cache."""
    adapter: str | None = None
    """Name of the adapter to sample from; the model alone by default."""
    image_data: tuple[str, ...] = ()
    """`data:` URLs of the images, one for each placeholder in `input_ids`."""
    routed_from: int | None = None
    """Position of the first token whose routed experts are returned; None returns none."""


class GenerateResult(Value):
    """The sampled output."""

    output_ids: TokenIds
    """Sampled ids, including the end-of-turn token, int32 [T]."""
    output_logprobs: Logprobs
    """Behavior logprobs after temperature, float32 [T]."""
    version_spans: tuple[VersionSpan, ...]
    """Half-open and contiguous; they cover `output_ids` exactly."""
    finish_reason: FinishReason
    matched: int | str | None = None
    """Token id or string that ended the generation; None if nothing matched."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were reused."""
    num_retractions: int = 0
    server: str = ""
    """Base address of the server."""
    routed_experts: bytes = b""
    """Routed experts of every token from `routed_from` to the second to last, int32 [tokens,
    layers, experts per token]; of the last computation, if a token was computed more than once.
    """


def policy_version(label: object) -> int:
    """Return the policy version for a server's weight label."""
    text = str(label)
    if text == MIXED_LABEL:
        return MIXED_VERSION
    return int(text) if text.isdecimal() else START_VERSION


def adapter_version(name: str) -> int:
    """Return the policy version in an adapter's name, `RUN-..-v12`.

    Raises:
        InferenceError: the name has none.
    """
    version = name.rpartition("-v")[2]
    if not version.isdecimal():
        raise InferenceError(f"the adapter name {name!r} does not end in a version, as -v12")
    return int(version)


def request_body(request: GenerateRequest, *, stream: bool = False) -> dict[str, Any]:
    """Return the JSON body of `/generate`. Every sampling parameter is sent explicitly."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": sampling.max_new_tokens,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.grammar is not None:
        params[sampling.grammar.kind] = sampling.grammar.text
    body: dict[str, Any] = {
        "rid": request.rid,
        "input_ids": request.input_ids.tolist(),
        "sampling_params": params,
        "return_logprob": True,
    }
    if stream:
        body["stream"] = True
        params["stream_interval"] = STREAM_INTERVAL
    named = {
        "priority": request.priority,
        "extra_key": request.extra_key,
        "lora_path": request.adapter,
    }
    body |= {name: value for name, value in named.items() if value is not None}
    if request.image_data:
        body["image_data"] = list(request.image_data)
    if request.routed_from is not None:
        body["return_routed_experts"] = True
        body["routed_experts_start_len"] = request.routed_from
    return body


_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
_MAX_LOGPROB = 1e-3
"""A probability of 1, with the rounding of servers that renormalize after `top_p`."""
_MIN_LOGPROB = -1e4
"""No softmax over a trained model's logits reaches it: they differ by hundreds, and finite masks
begin there. A single lower value would outweigh all others of a step."""


def parse_result(
    body: Mapping[str, Any], server: str, *, adapter: str | None = None
) -> GenerateResult:
    """Read a response of `/generate`.

    Args:
        body: the decoded JSON object.
        server: base address of the server, for the result and for errors.
        adapter: the adapter that the request named. Its version sampled all tokens; the version
            that the server reports is the base model's.

    Raises:
        ServerRefused: the server aborted the generation with an error status, or sampled with
            weights of two versions.
        InferenceError: the response lacks tokens or logprobs, or has impossible ones.
    """
    try:
        return _result(body, body["meta_info"], server, adapter)
    except _MALFORMED as error:
        raise InferenceError(
            f"{server} sent a generation with missing or malformed output_ids, logprobs or "
            f"finish_reason ({repr(error)[:200]})"
        ) from error


def _result(
    body: Mapping[str, Any], meta: Mapping[str, Any], server: str, adapter: str | None
) -> GenerateResult:
    reason = meta["finish_reason"]
    kind = reason["type"]
    triples = meta.get("output_token_logprobs") or ()
    output_ids = np.asarray(body["output_ids"], dtype=np.int32)
    logprobs = _logprobs(triples)
    if kind == "abort" and reason.get("status_code"):
        message = f"{server} aborted a generation: {reason.get('message', 'no reason given')}"
        raise ServerRefused(message, int(reason["status_code"]))
    if kind == "abort":
        # If a request is aborted while it waits, its last ids or logprobs may be missing.
        length = min(len(output_ids), len(logprobs))
        output_ids, logprobs = output_ids[:length], logprobs[:length]
    if len(output_ids) != len(logprobs):
        raise InferenceError(f"{server} sent {len(output_ids)} tokens but {len(logprobs)} logprobs")
    spans = _spans(meta, len(output_ids), adapter)
    if any(span.version == MIXED_VERSION for span in spans):
        raise ServerRefused(f"{server} sampled with weights of two versions", 503)
    return GenerateResult(
        output_ids=output_ids,
        output_logprobs=logprobs,
        version_spans=spans,
        finish_reason=_finish_reason(kind, server),
        matched=_matched(reason.get("matched")),
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        num_retractions=int(meta.get("num_retractions") or 0),
        server=server,
        routed_experts=_routed_experts(meta, server),
    )


def prompt_logprobs_body(input_ids: np.ndarray, start: int) -> dict[str, Any]:
    """Return the JSON body of `/generate` that asks for logprobs of a prompt and samples nothing."""
    return {
        "rid": new_rid(),
        "input_ids": input_ids.tolist(),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": start,
    }


def parse_prompt_logprobs(body: Mapping[str, Any], expected: np.ndarray, server: str) -> np.ndarray:
    """Read the logprobs of prompt tokens, float32 [N].

    Args:
        body: the decoded JSON object.
        expected: the N tokens after the one at `logprob_start_len`, which has no logprob.
        server: base address of the server, for errors.

    Raises:
        InferenceError: logprobs are missing or impossible, or are those of other tokens.
    """
    try:
        _, *triples = body["meta_info"]["input_token_logprobs"]
        ids = np.asarray([triple[1] for triple in triples], dtype=np.int64)
        logprobs = _logprobs(triples)
    except _MALFORMED as error:
        raise InferenceError(
            f"{server} sent missing or malformed logprobs of a prompt ({repr(error)[:200]})"
        ) from error
    if not np.array_equal(ids, expected):
        raise InferenceError(f"{server} sent the logprobs of other tokens than it was asked for")
    return logprobs


def _logprobs(triples: Iterable[Sequence[Any]]) -> np.ndarray:
    """Return the first values of (logprob, token id, text), float32.

    Raises:
        ValueError: one is not a number, or no logprob that a model can have.
    """
    values = [triple[0] for triple in triples]
    for value in values:
        # numpy would read `true` as 1 and "-2" as -2. The comparison is false for NaN.
        if type(value) not in (float, int) or not _MIN_LOGPROB <= value <= _MAX_LOGPROB:
            raise ValueError(f"a logprob of {value!r}")
    return np.asarray(values, dtype=np.float32)


def parse_partial(
    body: Mapping[str, Any], server: str, *, adapter: str | None = None
) -> GenerateResult:
    """Read a frame of an unfinished stream, as if the generation had been cut there.

    Raises:
        InferenceError: see `parse_result`.
    """
    reported = body.get("meta_info")
    meta = reported if isinstance(reported, Mapping) else {}
    aborted = {**body, "meta_info": {**meta, "finish_reason": {"type": "abort"}}}
    return parse_result(aborted, server, adapter=adapter)


def _matched(value: object) -> int | str | None:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return value[-1] if value else None
    return value if isinstance(value, int | str) else None


def _routed_experts(meta: Mapping[str, Any], server: str) -> bytes:
    try:
        return base64.b64decode(meta.get("routed_experts") or "", validate=True)
    except (TypeError, binascii.Error) as error:
        raise InferenceError(f"{server} sent routed_experts that are not base64") from error


def _finish_reason(kind: object, server: str) -> FinishReason:
    if kind == "stop":
        return "stop"
    if kind == "length":
        return "length"
    if kind == "abort":
        return "abort"
    raise InferenceError(f"{server} ended a generation for an unknown reason: {kind!r}")


def _spans(meta: Mapping[str, Any], length: int, adapter: str | None) -> tuple[VersionSpan, ...]:
    if adapter is not None:
        whole = VersionSpan(version=adapter_version(adapter), start=0, end=length)
        return fit_spans([whole], length)
    reported = meta.get("weight_versions") or ()
    spans = [
        VersionSpan(
            version=policy_version(span["version"]), start=int(span["start"]), end=int(span["end"])
        )
        for span in reported
    ]
    if not spans:
        version = policy_version(meta.get("weight_version"))
        spans = [VersionSpan(version=version, start=0, end=length)]
    fitted = fit_spans(spans, length)
    if length and not fitted:
        raise InferenceError(
            f"a server reported no policy version for {length} tokens: {reported!r}"
        )
    return fitted


def fit_spans(spans: Iterable[VersionSpan], length: int) -> tuple[VersionSpan, ...]:
    """Trim and join spans to cover `[0, length)` exactly.

    A server may report spans for tokens that it did not deliver, so the number of tokens decides.
    Adjacent spans of the same version are joined.
    """
    fitted: list[VersionSpan] = []
    for span in spans:
        start = fitted[-1].end if fitted else 0
        end = min(span.end, length)
        if end <= start:
            continue
        if fitted and fitted[-1].version == span.version:
            start = fitted.pop().start
        fitted.append(VersionSpan(version=span.version, start=start, end=end))
    if fitted and fitted[-1].end < length:
        last = fitted.pop()
        fitted.append(VersionSpan(version=last.version, start=last.start, end=length))
    return tuple(fitted)


def join_results(parts: Sequence[GenerateResult]) -> GenerateResult:
    """Return the generation that was sampled in several parts, each resuming the one before."""
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        spans.extend(
            VersionSpan(version=span.version, start=span.start + offset, end=span.end + offset)
            for span in part.version_spans
        )
        offset += len(part.output_ids)
    last = parts[-1]
    return GenerateResult(
        output_ids=np.concatenate([part.output_ids for part in parts]),
        output_logprobs=np.concatenate([part.output_logprobs for part in parts]),
        version_spans=fit_spans(spans, offset),
        finish_reason=last.finish_reason,
        matched=last.matched,
        prompt_tokens=parts[0].prompt_tokens,
        cached_tokens=parts[0].cached_tokens,
        num_retractions=sum(part.num_retractions for part in parts),
        server=last.server,
        routed_experts=last.routed_experts,
    )
