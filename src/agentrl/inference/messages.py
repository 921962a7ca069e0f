"""What a generation asks for and what it returns, and how both look on SGLang's wire."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl.errors import InferenceError
from agentrl.schema import FinishReason, SamplingParams, VersionSpan


def _new_rid() -> str:
    # Fixed width: servers match aborts by prefix.
    return uuid.uuid4().hex


@dataclass(frozen=True)
class GenerateRequest:
    """One generation: token ids in, token ids out.

    Attributes:
        input_ids: the prompt, int32 [P].
        sampling: how tokens are drawn.
        rid: id of the request on the server; unique among the live ones.
        extra_key: namespace of the prefix cache, if any.
    """

    input_ids: np.ndarray
    sampling: SamplingParams
    rid: str = field(default_factory=_new_rid)
    extra_key: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON body of `/generate`. Nothing is left to a server's defaults."""
        sampling = self.sampling
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "max_new_tokens": sampling.max_new_tokens,
            "skip_special_tokens": False,
        }
        if sampling.stop_token_ids:
            params["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        body: dict[str, Any] = {
            "rid": self.rid,
            "input_ids": np.asarray(self.input_ids).tolist(),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        if self.extra_key is not None:
            body["extra_key"] = self.extra_key
        return body


@dataclass(frozen=True)
class GenerateResult:
    """What was sampled.

    Attributes:
        output_ids: sampled ids, the stop token included, int32 [T].
        output_logprobs: their log-probabilities after temperature, before truncation, float32 [T].
        version_spans: policy versions, half open and contiguous over the T tokens.
        finish_reason: `stop`, `length` or `abort`.
        prompt_tokens: length of the prompt.
        cached_tokens: prompt tokens that were served from the prefix cache.
        num_retractions: how often the generation was recomputed.
        server: base URL of the server that sampled (the last one, after a resumption).
    """

    output_ids: np.ndarray
    output_logprobs: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0
    server: str = ""


def parse_result(body: Mapping[str, Any], *, server: str) -> GenerateResult:
    """Read an answer of `/generate`.

    The ids are what counts: spans and logprobs are held against their number.

    Raises:
        InferenceError: the answer is not one, or ids and logprobs do not belong together.
    """
    try:
        meta = body["meta_info"]
        ids = np.asarray(body["output_ids"], dtype=np.int32)
        triples: Sequence[Sequence[Any]] = meta.get("output_token_logprobs") or ()
        finish = meta["finish_reason"]["type"]
        latest = meta.get("weight_version")
        spans = meta.get("weight_versions")
    except (KeyError, TypeError, ValueError) as error:
        raise InferenceError(f"{server}: unexpected answer to a generation ({error!r})") from error
    if finish not in ("stop", "length", "abort"):
        raise InferenceError(f"{server}: a generation ended by {finish!r}, which is not known here")
    if len(triples) < len(ids) or any(
        token != id_ for (_, token, *_), id_ in zip(triples, ids.tolist(), strict=False)
    ):
        raise InferenceError(f"{server}: logprobs do not belong to the sampled ids")
    return GenerateResult(
        output_ids=ids,
        output_logprobs=np.asarray([t[0] for t in triples[: len(ids)]], dtype=np.float32),
        version_spans=_parse_spans(spans, latest, len(ids)),
        finish_reason=finish,
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        num_retractions=int(meta.get("num_retractions") or 0),
        server=server,
    )


def policy_version(label: object) -> int:
    """Return the policy version behind a weight label; foreign labels (`default`) are version 0."""
    text = str(label)
    return int(text) if text.isdecimal() else 0


def join_results(first: GenerateResult, rest: GenerateResult) -> GenerateResult:
    """Return a generation that was cut after `first` and resumed by `rest` as one."""
    offset = len(first.output_ids)
    spans = [span for span in first.version_spans if span.end > span.start]
    for span in rest.version_spans:
        moved = VersionSpan(version=span.version, start=span.start + offset, end=span.end + offset)
        if spans and spans[-1].version == moved.version:
            moved = moved.model_copy(update={"start": spans.pop().start})
        spans.append(moved)
    return GenerateResult(
        output_ids=np.concatenate([first.output_ids, rest.output_ids]),
        output_logprobs=np.concatenate([first.output_logprobs, rest.output_logprobs]),
        version_spans=tuple(span for span in spans if span.end > span.start),
        finish_reason=rest.finish_reason,
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        num_retractions=first.num_retractions + rest.num_retractions,
        server=rest.server,
    )


def _parse_spans(spans: Any, latest: object, num_tokens: int) -> tuple[VersionSpan, ...]:
    """Return contiguous spans over exactly `num_tokens` tokens.

    Servers may count tokens that an abort lost, and old ones send no spans at all.
    """
    parsed: list[VersionSpan] = []
    for span in spans or ():
        start = parsed[-1].end if parsed else 0
        end = min(int(span["end"]), num_tokens)
        if end > start:
            version = policy_version(span["version"])
            parsed.append(VersionSpan(version=version, start=start, end=end))
    end = parsed[-1].end if parsed else 0
    if end < num_tokens:
        version = parsed[-1].version if parsed else policy_version(latest)
        if parsed:
            end = parsed.pop().start
        parsed.append(VersionSpan(version=version, start=end, end=num_tokens))
    return tuple(parsed)
