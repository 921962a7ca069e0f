"""Answers of `/generate`."""

import base64
import time
from itertools import pairwise
from typing import Any

from agentrl.plugins.engine.generation.token_sequence import FinishReason, TokenSequence
from agentrl.plugins.engine.http.engine_bodies import ParsedRequest
from agentrl.plugins.engine.http.text_codec import TextCodec


def answer(
    sequence: TokenSequence, request: ParsedRequest, text: TextCodec, label: str
) -> dict[str, Any]:
    """Return the object that describes a sequence so far.

    The label is that of a sequence without any token.
    """
    # The engine's thread may be appending; logprobs are appended last.
    count = len(sequence.output_logprobs)
    output_ids = sequence.output_ids[:count]
    finish = sequence.finish
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": None if finish is None else _finish_reason(finish, count),
        "prompt_tokens": sequence.num_prompt,
        "completion_tokens": count,
        "cached_tokens": sequence.num_cached or 0,
        "reasoning_tokens": 0,
        "num_retractions": sequence.num_retractions,
        "weight_version": sequence.versions[-1][0] if sequence.versions else label,
        "response_sent_to_client_ts": time.time(),
    }
    if finish is not None:
        meta["weight_versions"] = version_spans(sequence, count, label)
        if request.body.return_routed_experts and sequence.routed_experts is not None:
            # The last token was never computed.
            experts = sequence.routed_experts[
                request.body.routed_experts_start_len : sequence.length - 1
            ].astype("<i4")
            meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
    if request.body.return_logprob:
        meta |= _logprobs(sequence, request, text, count)
    body: dict[str, Any] = {"output_ids": output_ids, "meta_info": meta}
    if text.is_available:
        body["text"] = text.of_output(
            output_ids,
            finish,
            skip_special=request.sampling.skip_special_tokens is not False,
            trim=not request.sampling.no_stop_trim,
        )
    if request.body.return_prompt_token_ids:
        body["prompt_token_ids"] = sequence.tokens[: sequence.num_prompt].tolist()
    return body


def version_spans(sequence: TokenSequence, count: int, label: str) -> list[dict[str, Any]]:
    """Return the weight versions of the first `count` output tokens as half-open spans.

    Without any token there is one empty span, of the version `label`.
    """
    if not count:
        return [{"version": label, "start": 0, "end": 0}]
    starts = [*sequence.versions, ("", count)]
    return [
        {"version": label, "start": start, "end": min(end, count)}
        for (label, start), (_, end) in pairwise(starts)
        if start < count
    ]


def _finish_reason(finish: FinishReason, count: int) -> dict[str, Any]:
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": count}
    return {
        "type": "abort",
        "message": finish.message,
        "status_code": finish.status,
        "err_type": None,
    }


def _logprobs(
    sequence: TokenSequence, request: ParsedRequest, text: TextCodec, count: int
) -> dict[str, Any]:
    def token_text(token: int) -> str | None:
        return text.of_token(token) if request.body.return_text_in_logprobs else None

    start = request.body.logprob_start_len
    prompt: list[list[Any]] = []
    if start >= 0:
        values: list[float | None] = [None, *sequence.prompt_logprobs]
        tokens = sequence.tokens[start : sequence.num_prompt].tolist()
        prompt = [[value, t, token_text(t)] for value, t in zip(values, tokens, strict=False)]
    output = zip(sequence.output_logprobs[:count], sequence.output_ids[:count], strict=True)
    return {
        "input_token_logprobs": prompt,
        "output_token_logprobs": [[value, token, token_text(token)] for value, token in output],
        "output_token_logprobs_length": count,
    }
