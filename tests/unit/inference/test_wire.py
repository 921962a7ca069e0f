"""Requests and results on the wire."""

from typing import Any

import numpy as np
import pytest
from support.stub_server import generation

from agentrl.errors import InferenceError, ServerRefused
from agentrl.inference.client.json_transport import error_message
from agentrl.inference.wire import (
    GenerateRequest,
    fit_spans,
    join_results,
    parse_partial,
    parse_prompt_logprobs,
    parse_result,
    policy_version,
    request_body,
)
from agentrl.schema import SamplingParams, VersionSpan
from agentrl.schema.grammar import Grammar


def spans(*triples: tuple[int, int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in triples)


def test_every_sampling_parameter_is_sent() -> None:
    request = GenerateRequest(input_ids=[1, 2], sampling=SamplingParams(seed=7, max_new_tokens=9))
    body = request_body(request)
    assert body["return_logprob"] is True
    assert body["input_ids"] == [1, 2]
    assert body["sampling_params"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": 9,
        "sampling_seed": 7,
    }
    bounded = SamplingParams(
        stop=("\n",), stop_token_ids=(5,), top_k=9, grammar=Grammar(kind="regex", text="a+")
    )
    request = GenerateRequest(
        input_ids=[1], sampling=bounded, extra_key="run", adapter="a-v1", image_data=("data:,",)
    )
    body = request_body(request, stream=True)
    given = ("stop", "stop_token_ids", "top_k", "regex")
    assert [body["sampling_params"][name] for name in given] == [["\n"], [5], 9, "a+"]
    assert (body["stream"], body["extra_key"], body["lora_path"], body["image_data"]) == (
        *(True, "run", "a-v1"),
        ["data:,"],
    )


def test_experts_are_asked_for_from_the_first_token_that_is_new() -> None:
    plain = GenerateRequest(input_ids=[1, 2], sampling=SamplingParams())
    assert "return_routed_experts" not in request_body(plain)
    body = request_body(plain.model_copy(update={"routed_from": 1}))
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 1)


def test_experts_that_cannot_be_read_are_an_error() -> None:
    assert parse_result(generation([1], routed_experts="AQAAAA=="), "s").routed_experts == (
        b"\x01\x00\x00\x00"
    )
    assert parse_result(generation([1]), "s").routed_experts == b""
    for broken in ("no base64!", 7):
        with pytest.raises(InferenceError, match="s sent routed_experts that are not base64"):
            parse_result(generation([1], routed_experts=broken), "s")


def test_a_resumed_generation_has_the_experts_of_its_last_part() -> None:
    parts = [
        parse_result(generation([1], "abort", routed_experts="AQAAAA=="), "s"),
        parse_result(generation([2], routed_experts="AQAAAAIAAAA="), "s"),
    ]
    assert join_results(parts).routed_experts == parts[1].routed_experts


def test_request_ids_have_one_length_so_none_is_a_prefix_of_another() -> None:
    rids = {GenerateRequest(input_ids=[1], sampling=SamplingParams()).rid for _ in range(50)}
    assert len(rids) == 50
    assert {len(rid) for rid in rids} == {32}


@pytest.mark.parametrize(("label", "version"), [("12", 12), (3, 3), ("default", 0), (None, 0)])
def test_label_that_is_no_number_is_version_zero(label: object, version: int) -> None:
    assert policy_version(label) == version


@pytest.mark.parametrize(
    ("given", "length", "fitted"),
    [
        (spans((1, 0, 3), (2, 3, 5)), 5, spans((1, 0, 3), (2, 3, 5))),
        (spans((1, 0, 3), (2, 3, 9)), 5, spans((1, 0, 3), (2, 3, 5))),
        (spans((1, 0, 3), (2, 3, 5)), 2, spans((1, 0, 2))),
        (spans((1, 0, 3)), 5, spans((1, 0, 5))),
        (spans((1, 1, 2), (1, 2, 5)), 5, spans((1, 0, 5))),
        (spans((1, 0, 3), (2, 4, 5)), 5, spans((1, 0, 3), (2, 3, 5))),
        (spans((1, 0, 3)), 0, ()),
    ],
)
def test_spans_cover_the_tokens_exactly(
    given: tuple[VersionSpan, ...], length: int, fitted: tuple[VersionSpan, ...]
) -> None:
    assert fit_spans(given, length) == fitted


def test_result_without_spans_takes_the_one_version() -> None:
    body = generation([5, 6], version="4")
    del body["meta_info"]["weight_versions"]
    assert parse_result(body, "s").version_spans == spans((4, 0, 2))


def test_spans_that_cover_no_token_are_an_error() -> None:
    body = generation([5, 6], version="4")
    body["meta_info"]["weight_versions"] = [{"version": "4", "start": 0, "end": 0}]
    with pytest.raises(InferenceError, match="no policy version for 2 tokens"):
        parse_result(body, "s")


def test_aborted_result_keeps_tokens_that_have_a_logprob() -> None:
    body = generation([5, 6, 7], kind="abort", version="4")
    del body["meta_info"]["output_token_logprobs"][2]
    result = parse_result(body, "s")
    assert result.output_ids.tolist() == [5, 6]
    assert result.version_spans == spans((4, 0, 2))


@pytest.mark.parametrize("labels", [("mixed", "mixed"), ("mixed", "4"), ("4", "mixed")])
def test_tokens_of_two_versions_at_once_are_refused(labels: tuple[str, str]) -> None:
    body = generation([5, 6])
    body["meta_info"]["weight_versions"] = [
        {"version": label, "start": n, "end": n + 1} for n, label in enumerate(labels)
    ]
    with pytest.raises(ServerRefused, match="weights of two versions"):
        parse_result(body, "s")


def test_abort_with_an_error_status_is_a_refusal() -> None:
    body = generation([5], kind="abort")
    body["meta_info"]["finish_reason"] |= {"message": "out of memory", "status_code": 503}
    with pytest.raises(ServerRefused, match="out of memory") as refused:
        parse_result(body, "http://s")
    assert refused.value.is_transient


@pytest.mark.parametrize("missing", ["output_token_logprobs", "finish_reason", "output_ids"])
def test_result_that_lacks_a_part_is_an_error(missing: str) -> None:
    body = generation([5, 6])
    (body if missing in body else body["meta_info"]).pop(missing)
    with pytest.raises(InferenceError, match="http://s"):
        parse_result(body, "http://s")


IMPOSSIBLE = [None, True, False, "-2.0", [-2.0], 50, 0.002, -10_001.0, -3e38, float("nan")]


@pytest.mark.parametrize("value", IMPOSSIBLE)
def test_a_logprob_that_no_model_has_is_an_error(value: object) -> None:
    body = generation([5, 6])
    body["meta_info"]["output_token_logprobs"][0][0] = value
    with pytest.raises(InferenceError, match="http://s"):
        parse_result(body, "http://s")
    with pytest.raises(InferenceError, match="http://s"):
        parse_partial(body, "http://s")


def prompt_answer(*triples: list[Any]) -> dict[str, Any]:
    return {"meta_info": {"input_token_logprobs": [[None, 4, None], *triples]}}


@pytest.mark.parametrize("value", IMPOSSIBLE)
def test_a_teachers_logprob_that_no_model_has_is_an_error(value: object) -> None:
    body = prompt_answer([-1.0, 5, None], [value, 6, None])
    with pytest.raises(InferenceError, match="http://t sent missing or malformed logprobs"):
        parse_prompt_logprobs(body, np.array([5, 6]), "http://t")


def test_the_least_and_the_greatest_logprobs_are_read() -> None:
    body = prompt_answer([-1e4, 5, None], [0, 6, None], [1e-6, 7, None])
    read = parse_prompt_logprobs(body, np.array([5, 6, 7]), "http://t")
    np.testing.assert_array_equal(read, np.array([-1e4, 0, 1e-6], np.float32))


@pytest.mark.parametrize(
    ("answered", "problem"),
    [
        ([[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]], None),
        ([[None, 5, None], [-1.0, 6, None], [-2.0, 8, None]], "of other tokens"),
        ([[None, 4, None], [-1.0, 5, None], [-2.0, 6, None]], "of other tokens"),
        ([[None, 5, None], [-1.0, 6, None]], "of other tokens"),
        ([[None, 5, None], [-1.0, 6, None], [float("-inf"), 7, None]], "missing or malformed"),
        ([[None, 5, None], [-1.0, 6, None], ["x", 7, None]], "missing or malformed"),
        ([], "missing or malformed"),
    ],
)
def test_logprobs_of_a_prompt_are_those_of_its_tokens(
    answered: list[list[object]], problem: str | None
) -> None:
    body = {"meta_info": {"input_token_logprobs": answered}}
    if problem is None:
        assert parse_prompt_logprobs(body, np.array([6, 7]), "s").tolist() == [-1.0, -2.0]
        return
    with pytest.raises(InferenceError, match=problem):
        parse_prompt_logprobs(body, np.array([6, 7]), "s")


def test_parts_of_a_resumed_generation_are_joined() -> None:
    first = parse_result(generation([1, 2], kind="abort", version="1", num_retractions=1), "a")
    second = parse_result(generation([3], kind="abort", version="1"), "b")
    third = parse_result(generation([4, 5], version="2", cached_tokens=9, prompt_tokens=6), "c")
    joined = join_results([first, second, third])
    assert joined.output_ids.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(joined.output_logprobs, [-1.5, -2.5, -3.5, -4.5, -5.5])
    assert joined.version_spans == spans((1, 0, 3), (2, 3, 5))
    assert (joined.finish_reason, joined.cached_tokens, joined.num_retractions) == ("stop", 1, 1)
    assert (joined.server, joined.prompt_tokens) == ("c", 3)


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "why"}},
        {"error": "why"},
        {"object": "error", "message": "why", "code": 400},
        {"success": False, "message": "why"},
        {"detail": "why"},
        "why",
    ],
    ids=str,
)
def test_message_is_found_in_every_shape_of_error(body: object) -> None:
    assert error_message(body) == "why"
