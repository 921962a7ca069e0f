"""The Function Calling Leaderboard's own checkers accept its references, and nothing else.

All rows: `tests/integration/test_bfcl_rows.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.agent_venvs import python_with

from agentrl.config.sections import DataSection
from agentrl.errors import ConfigError
from agentrl.plugins.environments import EnvironmentProcess, EnvironmentUri
from examples.bfcl.demonstrations import Oracle, played

CATEGORIES = (
    *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel"),
    *("parallel_multiple", "irrelevance", "live_simple", "live_multiple", "live_parallel"),
    *("live_parallel_multiple", "live_irrelevance", "live_relevance", "multi_turn_base"),
)


@pytest.fixture(scope="module")
def python() -> Path:
    return python_with("bfcl")


class Silent(Oracle):
    """Says nothing."""

    def __call__(self, messages: Any, tools: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": ""}


def scores(env: str, python: Path, policy: type[Oracle] = Oracle) -> dict[str, float]:
    return {number: score for number, score, _ in played(env, python, policy)}


def rows(env: str, python: Path) -> list[dict[str, Any]]:
    uri = EnvironmentUri.parse(env)
    with EnvironmentProcess(uri, DataSection(env_python=python), quiet=True) as environment:
        return environment.rows(range(environment.size()))


def test_references_are_right_and_empty_replies_only_where_no_call_is(python: Path) -> None:
    env = f"bfcl:{','.join(CATEGORIES)}?size=60"
    assert set(scores(env, python).values()) == {1.0}
    silent = scores(env, python, Silent)
    assert {number for number, score in silent.items() if score} == {
        number for number in silent if "irrelevance" in number
    }
    assert len({number.rpartition("_")[0] for number in silent}) >= 10


def test_a_reference_with_one_argument_more_is_wrong(python: Path) -> None:
    class Careless(Oracle):
        def __call__(self, messages: Any, tools: Any) -> dict[str, Any]:
            reply = super().__call__(messages, tools)
            function = reply["tool_calls"][0]["function"]
            function["arguments"] = json.dumps(json.loads(function["arguments"]) | {"more": 1})
            return reply

    found = scores("bfcl:simple_python,multiple,live_simple?size=12", python, Careless)
    assert set(found.values()) == {0.0}


def test_two_splits_share_no_question_and_the_same_one_in_two_categories_is_in_one(
    python: Path,
) -> None:
    env = "bfcl:simple_python,multiple,live_simple"
    parts = [rows(f"{env}?split={split}", python) for split in ("train", "eval")]
    train, held_out = ({row["query"].lower() for row in part} for part in parts)
    assert train.isdisjoint(held_out)
    assert sum(map(len, parts)) == len(rows(env, python)) == 858
    assert [len(part) for part in parts] == [682, 176]


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ("bfcl:memory_kv", "'memory_kv' is not supported; give one of simple_python, "),
        ("bfcl:live_simpl", "'live_simpl' is unknown; give one of simple_python, "),
        ("bfcl:live_simple?split=test", "split=test: expected train or eval"),
        ("bfcl:live_simple?seed=1", "unknown parameter 'seed'"),
    ],
)
def test_a_mistake_is_said_in_one_line(python: Path, env: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        rows(env, python)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("open", '{"file": "/tmp/bfcl-was-here", "mode": "w"}'),
        ("cd", "{\"folder=open(file='/tmp/bfcl-was-here', mode='w'), x\": 1}"),
        ("__class__", "{}"),
        ("power", '{"base": 9, "exponent": 1000000000000}'),
        ("cd", "[1]"),
        ("cd", "{"),
    ],
)
def test_a_call_that_is_none_of_the_tools_is_an_error_for_the_model_alone(
    python: Path, name: str, arguments: str
) -> None:
    heard: list[str] = []

    class Hostile(Oracle):
        def __call__(self, messages: Any, tools: Any) -> dict[str, Any]:
            results = [one["content"] for one in messages if one["role"] == "tool"]
            heard.extend(results)
            if results:
                return {"role": "assistant", "content": "Done."}
            call = {"id": "a", "function": {"name": name, "arguments": arguments}}
            return {"role": "assistant", "content": "", "tool_calls": [call]}

    assert set(scores("bfcl:multi_turn_base?size=1", python, Hostile).values()) == {0.0}
    assert not Path("/tmp/bfcl-was-here").exists()
    assert all(one.startswith("Error during execution: ") for one in heard)
