"""Readers of rows of known data sets: functions of a row and the columns of its parts (`row_shapes`).

The reference of a program is `{"tests": [..], "setup": ..}` (Python statements) or `{"inputs": [..],
"outputs": [..]}`, with `fn_name` if a function is called instead of a program that reads its standard input.
"""

import base64
import binascii
import hashlib
import io
import json
import os
import pickle
import random
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.datasets.entries import BadEntry
from agentrl.errors import DatasetError
from agentrl.runtime.row_files import open_row_file
from agentrl.schema.answer_form import BOXED, find_answer

Row = Mapping[str, Any]


class Columns(NamedTuple):
    """Where the parts of a question stand in a row: a column, or a key of one (`answer.value`)."""

    query: str = ""
    answer: str = ""
    listed: str = ""
    """All right answers, the choices, or the functions that may be called."""


_GSM8K = re.compile(r"^####[ \t]*(\S[^\n]*?)[ \t]*\Z", re.MULTILINE)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".gif", ".webp"})
_TEXT_SUFFIXES = frozenset(
    {".txt", ".csv", ".tsv", ".json", ".jsonl", ".jsonld", ".md", ".py", ".xml", ".html", ".pdb"}
)
_MAX_ATTACHED_BYTES = 100_000
"""Maximum size of an attachment whose text is added to a question."""
_MAX_TESTS_BYTES = 64 << 20
"""Maximum size of hidden tests; a small compressed text may expand far beyond it."""
_MAX_SHOWN = 80


def first_of(row: Row, *names: str) -> Any:
    """Return the first of these columns that has a value, or None."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def gsm8k_reference(answer: object) -> str | None:
    """Return what follows `####` in the last line of a worked solution, or None."""
    found = _GSM8K.search(answer.rstrip()) if isinstance(answer, str) else None
    return None if found is None else _without_thousands(found[1])


def plain(row: Row, at: Columns, folder: Path | None) -> Row:
    """Read a question whose reference is taken as it is."""
    return {"query": _value(row, at.query)}


def short(row: Row, at: Columns, folder: Path | None) -> Row:
    """Read a reference (the first of several) and the other answers that count as right."""
    own = _value(row, at.answer)
    given = [*own] if isinstance(own, list) else [own]
    if at.listed:
        given += _list(_value(row, at.listed), at.listed)
    texts = [_text(one) for one in given if one not in (None, "")]
    if not texts:
        raise BadEntry(f"no answer in `{at.listed or at.answer}`")
    first, *others = dict.fromkeys(texts)
    return {"query": _value(row, at.query), "answer": first, "aug_answers": others}


def math(row: Row, at: Columns, folder: Path | None) -> Row:
    """Read a mathematical problem; a worked solution gives its answer."""
    reference = _text(_value(row, at.answer))
    worked = gsm8k_reference(reference)
    if worked is None and "\\boxed" in reference:
        worked = find_answer(reference, BOXED)
    answer = _without_thousands(reference) if worked is None else worked
    return {"query": _value(row, at.query), "answer": answer}


def boxed(row: Row, at: Columns, folder: Path | None) -> Row:
    r"""Read a mathematical problem whose reference is the last `\boxed{}` of a worked solution."""
    found = find_answer(_value(row, at.answer), BOXED)
    if not found:
        raise BadEntry(
            f"no \\boxed{{}} in `{at.answer}`, so the row has no reference (proofs have none): leave it out"
        )
    return {"query": _value(row, at.query), "answer": found}


def choices(row: Row, at: Columns, folder: Path | None) -> Row:
    """Read choices, a list or `{"text": [..], "label": [..]}`, and the index, label or text of the right one."""
    given: Any = row[at.listed]
    labels: Sequence[Any] = ()
    if isinstance(given, dict):
        given, labels = given.get("text"), given.get("label") or ()
    texts = [_text(one) for one in _list(given, at.listed)]
    if not 2 <= len(texts) <= len(_LETTERS):
        raise BadEntry(f"{len(texts)} choices in `{at.listed}`; 2 to {len(_LETTERS)} are supported")
    right = row[at.answer]
    name = right.strip() if isinstance(right, str) else None
    if isinstance(right, int) and not isinstance(right, bool) and 0 <= right < len(texts):
        return _chosen(_text(row[at.query]), texts, right)
    for known in ([*map(str, labels)], [*_LETTERS[: len(texts)]], texts):
        if name and name in known:
            return _chosen(_text(row[at.query]), texts, known.index(name))
    raise BadEntry(
        f"`{at.answer}` is {right!r}, which is none of the choices (the answers of some test sets are "
        "hidden): use another split"
    )


def incorrect_choices(row: Row, at: Columns, folder: Path | None) -> Row:
    """Read right and wrong choices that are columns (GPQA), in an order drawn from the question.

    So it is the same at each reading, and the right choice is not always the first.
    """
    question, names = _text(row[at.query]), [f"Incorrect Answer {n}" for n in (1, 2, 3)]
    texts = [_text(row[at.answer]), *(_text(row[name]) for name in names if row.get(name))]
    order = list(range(len(texts)))
    random.Random(question).shuffle(order)
    return _chosen(question, [texts[position] for position in order], order.index(0))


def _chosen(question: str, texts: Sequence[str], right: int) -> Row:
    """Return a question with lettered choices; the letter and the text of the right one are right."""
    lines = "\n".join(f"{letter}. {one}" for letter, one in zip(_LETTERS, texts, strict=False))
    query = f"{question.strip()}\n\n{lines}\n\nAnswer with the letter of the right choice."
    return {"query": query, "answer": _LETTERS[right], "aug_answers": [texts[right]]}


def calls(row: Row, at: Columns, folder: Path | None) -> Row:
    """Read a request with the functions that may be called, and the calls that are right."""
    if row.get(at.answer) is None:
        raise BadEntry(
            f"no `{at.answer}`: BFCL keeps the right calls in a separate file (possible_answer); "
            "add them to the rows by `id`"
        )
    request = row[at.query]
    if not isinstance(request, str):
        if len(request) != 1:
            raise BadEntry(
                "a conversation of several turns: only BFCL's categories with one are supported"
            )
        request = "\n\n".join(_text(message.get("content")) for message in request[0])
    functions = [json.dumps(one, ensure_ascii=False) for one in _list(row[at.listed], at.listed)]
    query = "\n".join(
        [
            f"{request}\n\nFunctions that can be called:",
            *functions,
            '\nAnswer with a JSON list of the calls: [{"name": ..., "arguments": {...}}].',
        ]
    )
    return {"query": query, "answer": _list(row[at.answer], at.answer)}


def browsecomp(row: Row, at: Columns, folder: Path | None) -> Row:
    """Read question and reference of BrowseComp, which are encrypted with the row's `canary`."""
    key = hashlib.sha256(_text(row["canary"]).encode()).digest()
    texts = {}
    for name, column in (("query", at.query), ("answer", at.answer)):
        try:
            hidden = base64.b64decode(_text(row[column]), validate=True)
            texts[name] = bytes(
                byte ^ key[place % len(key)] for place, byte in enumerate(hidden)
            ).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise BadEntry(f"`{column}` cannot be decrypted with `canary`") from None
    return texts


def attached(row: Row, at: Columns, folder: Path | None) -> Row:
    """Read a GAIA question with its attachment: an image is shown, a text added."""
    question, answer = _text(row[at.query]), _text(row[at.answer])
    if answer == "?":
        raise BadEntry(f"`{at.answer}` is hidden (`?`) in GAIA's test split: use `validation`")
    fields = {"query": question, "answer": answer}
    name = row.get("file_name")
    if not name:
        return fields
    places = [str(one) for one in (row.get("file_path"), name) if one]
    place = next((one for one in places if os.path.exists((folder or Path()) / one)), places[-1])
    try:
        with open_row_file(folder, place) as file:
            content = file.read(_MAX_ATTACHED_BYTES + 1)
        suffix = Path(place).suffix.lower()
        if suffix in _IMAGE_SUFFIXES:
            return {**fields, "images": [place]}
        if suffix not in _TEXT_SUFFIXES or len(content) > _MAX_ATTACHED_BYTES:
            raise BadEntry(
                f"neither an image nor a text of at most {_MAX_ATTACHED_BYTES:,} bytes: convert it "
                "to one of them, or leave the row out"
            )
        text = content.decode()
    except (DatasetError, UnicodeDecodeError) as error:
        raise BadEntry(f"attachment {place[:_MAX_SHOWN]!r}: {error}") from None
    return {**fields, "query": f"{question}\n\nContent of {name}:\n{text}"}


def mbpp(row: Row, at: Columns, folder: Path | None) -> Row:
    """Return a task of MBPP, with its tests in the question, as its authors prompt."""
    tests = [_text(test) for test in _list(row["test_list"], "test_list")]
    imports = row.get("test_imports") or []
    setup = first_of(row, "test_setup_code") or "\n".join(map(str, imports))
    query = _text(first_of(row, "text", "query"))
    listed = "\n".join(tests)
    return {
        "query": f"{query}\n\nYour code should pass these tests:\n{listed}",
        "answer": {"tests": tests, "setup": str(setup)},
    }


def human_eval(row: Row, at: Columns, folder: Path | None) -> Row:
    """Return a task of HumanEval, whose prompt is the beginning of a function."""
    check = f"{_text(row['test'])}\n\ncheck({_text(row['entry_point'])})"
    return {
        "query": f"Complete this function:\n\n{row[at.query]}",
        "answer": {"tests": [check], "setup": ""},
    }


def unit_tests(row: Row, at: Columns, folder: Path | None) -> Row:
    """Return a task whose tests are JSON, with the question's starter code."""
    query = _with_starter(_text(row[at.query]), row) if at.query else None
    return {"query": query, "answer": _pairs(_json(row[at.answer], at.answer))}


def code_contests(row: Row, at: Columns, folder: Path | None) -> Row:
    """Return a task of CodeContests with its public, private and generated tests."""
    inputs, outputs = list[Any](), list[Any]()
    for column in ("public_tests", "private_tests", "generated_tests"):
        tests = row.get(column) or {}
        inputs += tests.get("input") or []
        outputs += tests.get("output") or []
    pairs = _pairs({"inputs": inputs, "outputs": outputs})
    return {"query": _text(row[at.query]), "answer": pairs}


def live_code_bench(row: Row, at: Columns, folder: Path | None) -> Row:
    """Return a task of LiveCodeBench with its public and private tests."""
    tests = _list(row["public_test_cases"], "public_test_cases")
    if row.get("private_test_cases"):
        tests += _private(_text(row["private_test_cases"]))
    metadata = _json(row.get("metadata") or "{}", "metadata")
    pairs: dict[str, Any] = {
        "inputs": [test["input"] for test in tests],
        "outputs": [test["output"] for test in tests],
    }
    if metadata.get("func_name"):
        pairs["fn_name"] = metadata["func_name"]
    query = _with_starter(_text(row[at.query]), row)
    return {"query": query, "answer": _pairs(pairs)}


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
        return _list(text, "private_test_cases")
    try:
        unpacker = zlib.decompressobj()
        packed = unpacker.decompress(base64.b64decode(text, validate=True), _MAX_TESTS_BYTES)
        return _list(_TextOnly(io.BytesIO(packed)).load(), "private_test_cases")
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError) as error:
        if isinstance(error, BadEntry):
            raise
        raise BadEntry(f"`private_test_cases` cannot be read: {error}") from None


def _value(row: Row, column: str) -> Any:
    name, _, key = column.partition(".")
    return row[name].get(key) if key else row.get(name)


def _text(value: object) -> str:
    """Return a reference as text; 27.0 is 27, as number columns hold floats."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if (
        isinstance(value, bool)
        or not isinstance(value, str | int | float)
        or not str(value).strip()
    ):
        raise BadEntry(f"a reference answer must be text or a number, found {value!r}")
    return str(value).strip()


def _without_thousands(number: str) -> str:
    """Return a number without the separators of its thousands; other text is unchanged."""
    bare = number.strip().removeprefix("$")
    return bare.replace(",", "") if _THOUSANDS.fullmatch(bare) else number.strip()


def _list(value: object, column: str) -> list[Any]:
    """Return a list that a column holds, itself or as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise BadEntry(f"`{column}` is neither a list nor one as JSON") from None
    if not isinstance(value, list):
        raise BadEntry(f"`{column}` must be a list, found {type(value).__name__}")
    return value
