"""What an exception of a scoring function means: an outage passes, a defect does not."""

import json
import pickle
import urllib.error
from typing import Any

import httpx
import openai
import pytest

from agentrl.errors import ScorerDefect, ScoringError, StoreError
from agentrl.rewards.scoring_failures import as_scoring_error

# Typed by whichever httpx the SDK names.
REQUEST: Any = httpx.Request("POST", "http://127.0.0.1/v1")


def answered(status: int) -> Any:
    return httpx.Response(status, request=REQUEST)


def behind(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError("no"),
        TimeoutError(),
        httpx.ReadTimeout("slow"),
        behind(openai.APIConnectionError(request=REQUEST), httpx.ConnectError("no")),
        openai.RateLimitError("slowly", response=answered(429), body=None),
        httpx.HTTPStatusError("500", request=REQUEST, response=answered(503)),
        behind(urllib.error.URLError("no route"), ConnectionResetError()),
        behind(RuntimeError("my judge failed"), TimeoutError()),
    ],
)
def test_a_network_or_judge_that_is_down_is_an_outage(error: Exception) -> None:
    found = as_scoring_error(error, "scorer 'judge'")
    assert isinstance(found, ScoringError)
    assert not isinstance(found, ScorerDefect)
    assert str(found).startswith(f"scorer 'judge' failed: {type(error).__name__}")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("could not convert"),
        FileNotFoundError("answers.csv"),
        openai.BadRequestError("no such field", response=answered(400), body=None),
    ],
)
def test_everything_else_is_a_defect(error: Exception) -> None:
    try:
        raise error
    except Exception as raised:  # noqa: BLE001
        found = as_scoring_error(raised, "scorer 's'")
    assert isinstance(found, ScorerDefect)
    assert pickle.loads(pickle.dumps(found)).kind == found.kind


def test_the_place_is_the_users_line_and_the_kind_does_not_depend_on_the_answer() -> None:
    def score(answer: str) -> object:
        return json.loads(answer)

    kinds = set()
    for answer in ("a word", "{"):
        try:
            score(answer)
        except ValueError as error:
            found = as_scoring_error(error, "scorer 's'")
            assert isinstance(found, ScorerDefect)
            kinds.add(found.kind)
            assert "JSONDecodeError: " in str(found)
            assert str(found).endswith(
                f"test_scoring_failures.py:{score.__code__.co_firstlineno + 1})"
            )
    assert len(kinds) == 1


def test_errors_of_the_infrastructure_stay_what_they_are() -> None:
    error = StoreError("mongod is away")
    assert as_scoring_error(error, "scorer 's'") is error
