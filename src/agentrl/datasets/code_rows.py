"""Pure functions that read programming tasks with unit tests; see `row_shapes`.

A reference is `{"tests": [..], "setup": ..}` (Python statements) or `{"inputs": [..], "outputs": [..]}`,
with `fn_name` if a function is called instead of a program that reads its standard input.
"""

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.datasets.entries import BadEntry
from agentrl.datasets.row_fields import decoded, first_of, text_of

Row = Mapping[str, Any]

_MAX_TESTS_BYTES = 64 << 20
"""Maximum size of hidden tests; a small compressed text may expand far beyond it."""


def mbpp(row: Row, folder: Path | None) -> Row:
    """Return a task of MBPP, with its tests in the question, as its authors prompt."""
    tests = [text_of(test) for test in decoded(row["test_list"], "test_list")]
    imports = row.get("test_imports") or []
    setup = first_of(row, "test_setup_code") or "\n".join(map(str, imports))
    query = text_of(first_of(row, "text", "query"))
    listed = "\n".join(tests)
    return {
        "query": f"{query}\n\nYour code should pass these tests:\n{listed}",
        "answer": {"tests": tests, "setup": str(setup)},
    }


def human_eval(row: Row, folder: Path | None) -> Row:
    """Return a task of HumanEval, whose prompt is the beginning of a function."""
    check = f"{text_of(row['test'])}\n\ncheck({text_of(row['entry_point'])})"
    return {
        "query": f"Complete this function:\n\n{row['query']}",
        "answer": {"tests": [check], "setup": ""},
    }


def input_output(row: Row, folder: Path | None) -> Row:
    """Return a task of APPS or TACO."""
    query = _with_starter(text_of(row["question"]), row)
    return {"query": query, "answer": _pairs(_json(row["input_output"], "input_output"))}


def ground_truth(row: Row, folder: Path | None) -> Row:
    """Return a task of Eurus-2-RL, whose tests are JSON in `reward_model.ground_truth`."""
    return {"answer": _pairs(_json(row["answer"], "reward_model.ground_truth"))}


def code_contests(row: Row, folder: Path | None) -> Row:
    """Return a task of CodeContests with its public, private and generated tests."""
    inputs, outputs = list[Any](), list[Any]()
    for column in ("public_tests", "private_tests", "generated_tests"):
        tests = row.get(column) or {}
        inputs += tests.get("input") or []
        outputs += tests.get("output") or []
    pairs = _pairs({"inputs": inputs, "outputs": outputs})
    return {"query": text_of(row["description"]), "answer": pairs}


def live_code_bench(row: Row, folder: Path | None) -> Row:
    """Return a task of LiveCodeBench with its public and private tests."""
    tests = decoded(row["public_test_cases"], "public_test_cases")
    if row.get("private_test_cases"):
        tests += _private(text_of(row["private_test_cases"]))
    metadata = _json(row.get("metadata") or "{}", "metadata")
    pairs: dict[str, Any] = {
        "inputs": [test["input"] for test in tests],
        "outputs": [test["output"] for test in tests],
    }
    if metadata.get("func_name"):
        pairs["fn_name"] = metadata["func_name"]
    query = _with_starter(text_of(row["question_content"]), row)
    return {"query": query, "answer": _pairs(pairs), "id": row.get("question_id")}


def _with_starter(query: str, row: Row) -> str:
    starter = row.get("starter_code")
    return f"{query}\n\nBegin with this code:\n{starter}" if starter else query


def _json(value: Any, column: str) -> dict[str, Any]:
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadEntry(f"`{column}` holds no object with unit tests: leave the row out")
    return found


def _pairs(tests: Row) -> Row:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not inputs or not outputs or len(inputs) != len(outputs):
        raise BadEntry("no unit tests with as many inputs as outputs: leave the row out")
    pairs = {"inputs": list(inputs), "outputs": list(outputs)}
    return {**pairs, "fn_name": tests["fn_name"]} if tests.get("fn_name") else pairs


class _TextOnly(pickle.Unpickler):
    """Unpickles plain values; a data file must not name code to run."""

    def find_class(self, module: str, name: str) -> Any:
        raise BadEntry(f"`private_test_cases` names code ({module}.{name}), which is never run")


def _private(text: str) -> list[Any]:
    """Return private tests: JSON, or JSON in a pickled text, compressed, in base64."""
    if text.startswith("["):
        return decoded(text, "private_test_cases")
    try:
        unpacker = zlib.decompressobj()
        packed = unpacker.decompress(base64.b64decode(text, validate=True), _MAX_TESTS_BYTES)
        return decoded(_TextOnly(io.BytesIO(packed)).load(), "private_test_cases")
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError) as error:
        if isinstance(error, BadEntry):
            raise
        raise BadEntry(f"`private_test_cases` cannot be read: {error}") from None
