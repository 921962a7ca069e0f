"""SGLang's own description of its JSON, generated into its wheel, judges what is sent and answered."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.engines import prompt, request
from support.sglang import sglang_bin

from agentrl.inference.wire import request_body

# The module needs nothing of SGLang: it is loaded by its path, without importing the package.
_JUDGE = """
import importlib.util, json, pathlib, sys
package = pathlib.Path(importlib.util.find_spec("sglang").origin).parent
spec = importlib.util.spec_from_file_location("api_types", package / "api/v1/api_types.py")
api = importlib.util.module_from_spec(spec)
sys.modules["api_types"] = api
spec.loader.exec_module(api)
for line in sys.stdin:
    kind, body = json.loads(line)
    try:
        read = getattr(api, kind).from_json_value(body)
        verdict = [True, read.to_json_value()]
    except api.JsonContractError as error:
        verdict = [False, str(error)]
    print(json.dumps(verdict), flush=True)
"""
pytestmark = pytest.mark.slow


class Judge:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def read(self, kind: str, body: object) -> tuple[bool, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([kind, body]) + "\n")
        self._process.stdin.flush()
        accepted, result = json.loads(self._process.stdout.readline())
        return accepted, result


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    python = sglang_bin() / "python"
    with subprocess.Popen(
        [python, "-c", _JUDGE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Judge(process)
        process.stdin.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0, "seed": 3, "stop_token_ids": (5, 6)},
        {"top_p": 0.5, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1},
        {"presence_penalty": 0.5, "frequency_penalty": -0.5, "max_new_tokens": 1},
    ],
)
def test_what_clients_send_is_read_as_it_was_meant(judge: Judge, params: dict[str, Any]) -> None:
    sent = request_body(request(1, **params).model_copy(update={"extra_key": "a"}))
    accepted, read = judge.read("GenerateRequest", sent)
    assert accepted, read
    for name, value in sent["sampling_params"].items():
        assert read["sampling_params"][name] == value
    for name in ("rid", "input_ids", "return_logprob", "extra_key"):
        assert read[name] == sent[name]


def test_judge_refuses_what_is_wrong(judge: Judge) -> None:
    accepted, message = judge.read("GenerateRequest", {"sampling_params": {"max_tokens": 1}})
    assert (accepted, "max_tokens" in message) == (False, True)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"return_logprob": True, "logprob_start_len": 0, "return_prompt_token_ids": True},
        {"return_logprob": True, "return_text_in_logprobs": True},
        {"sampling_params": {"max_new_tokens": 0}},
    ],
    ids=str,
)
async def test_answers_are_read_whole(
    judge: Judge, http: httpx.AsyncClient, body: dict[str, object]
) -> None:
    asked = {"input_ids": prompt(2).tolist(), "sampling_params": {"max_new_tokens": 4}} | body
    answer = (await http.post("/generate", json=asked)).json()
    accepted, read = judge.read("GenerateResponse", answer)
    assert accepted, read
    assert read["output_ids"] == answer["output_ids"]
    for name in ("weight_versions", "finish_reason", "prompt_tokens", "completion_tokens"):
        assert read["meta_info"][name] == answer["meta_info"][name]


async def test_broken_rule_is_told_in_the_stream(judge: Judge, http: httpx.AsyncClient) -> None:
    body = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 10**6}}
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 200
    frame, done = (line for line in answer.text.split("\n") if line)
    assert done == "data: [DONE]"
    accepted, read = judge.read("GenerateStreamError", json.loads(frame.removeprefix("data: ")))
    assert (accepted, read["error"]["code"]) == (True, 400)
