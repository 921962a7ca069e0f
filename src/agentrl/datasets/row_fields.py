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
from contextlib import suppress
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
_COUNTED = re.compile(r"\A([+-]?[\d.,/:]+) \([^()\d]{2,}\)\Z")
_LETTERED = re.compile(r"(?:^|\s*,\s*)[A-Ea-e]\s*\)\s*")
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


def short(row: Row, at: Columns, folder: Path | None) -> Row:
    """Read a reference (the first of several; yes or no) and the other answers that count as right."""
    own = _value(row, at.answer)
    if isinstance(own, bool):
        own = ["yes", "true"] if own else ["no", "false"]
    given = [*own] if isinstance(own, list) else [own]
    if at.listed:
        given += _list(_value(row, at.listed), at.listed)
    texts = [_text(one) for one in given if one not in (None, "")]
    if not texts:
        raise BadEntry(f"no answer in `{at.listed or at.answer}`: leave the row out")
    first, *others = dict.fromkeys(texts)
    return {"query": _query(row, at), "answer": first, "aug_answers": others}


def math(row: Row, at: Columns, folder: Path | None, *, boxed: bool = False) -> Row:
    """Read a mathematical problem; a worked solution gives its answer, and `9 (apples)` its number."""
    given = _value(row, at.answer)
    if given in (None, "", []):
        raise BadEntry(f"no answer in `{at.answer}`: leave the row out")
    reference = ", ".join(map(_text, given)) if isinstance(given, list) else _text(given)
    worked = gsm8k_reference(reference) or find_answer(reference, BOXED)
    if boxed and not worked:
        raise BadEntry(f"no \\boxed{{}} in `{at.answer}` (proofs have none): leave the row out")
    answer = worked or _without_thousands(_COUNTED.sub(r"\1", reference))
    return {"query": _query(row, at), "answer": answer}


def choices(row: Row, at: Columns, folder: Path | None, first: int | None = None) -> Row:
    """Read choices, and the index, label, letter or text of the right one; `first` numbers them from there."""
    texts, labels = _choices(row, at.listed)
    right = _value(row, at.answer)
    name = right.strip() if isinstance(right, str) else None
    if first is not None and name and name.isdecimal():
        right = int(name)
    if isinstance(right, int) and not isinstance(right, bool) and right >= (first or 0):
        position = right - (first or 0)
        if position < len(texts):
            return _chosen(row, at, texts, position)
    letters = _LETTERS[: len(texts)]
    for known in (labels, [*letters], texts, [*letters.lower()]):
        if name and name in known:
            return _chosen(row, at, texts, known.index(name))
    raise BadEntry(
        f"`{at.answer}` is {right!r}, which is none of the choices (the answers of some test sets are "
        "hidden): use another split"
    )


def drawn_choices(row: Row, at: Columns, folder: Path | None) -> Row:
    """Read the right choice and wrong ones, or choices and a 1 for the right one, in an order drawn from the question.

    So it is the same at each reading, and the right choice is not always the first.
    """
    right, (texts, _) = _value(row, at.answer), _choices(row, at.listed)
    is_marked = isinstance(right, list) and 1 in right
    texts.insert(0, texts.pop(right.index(1)) if is_marked else _text(right))
    order = list(range(len(texts)))
    random.Random(_query(row, at)).shuffle(order)
    return _chosen(row, at, [texts[position] for position in order], order.index(0))


def _choices(row: Row, column: str) -> tuple[list[str], list[str]]:
    """Return the texts of choices and their labels: of columns, a list, a text, or `{"text": [..], "label": [..]}`."""
    parts = [_value(row, one) for one in column.split(" & ")]
    while len(parts) > 1 and parts[-1] in (None, ""):
        parts.pop()
    given: Any = parts if " & " in column else parts[0]
    labels: Sequence[Any] = ()
    if isinstance(given, dict):
        given, labels = given.get("text"), given.get("label") or ()
    if isinstance(given, str) and _LETTERED.match(given):
        texts = _LETTERED.split(given)[1:]
    else:
        texts = [_text(one) for one in _list(given, column)]
    if not 2 <= len(texts) <= len(_LETTERS):
        raise BadEntry(f"{len(texts)} choices in `{column}`; 2 to {len(_LETTERS)} are supported")
    if all(map(_LETTERED.match, texts)):
        texts = [_LETTERED.sub("", one, count=1) for one in texts]
    return texts, [*map(str, labels)]


def _chosen(row: Row, at: Columns, texts: Sequence[str], right: int) -> Row:
    """Return a question with lettered choices; the letter and the text of the right one are right."""
    lines = "\n".join(f"{letter}. {one}" for letter, one in zip(_LETTERS, texts, strict=False))
    query = f"{_query(row, at)}\n\n{lines}\n\nAnswer with the letter of the right choice."
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


def encrypted(row: Row, at: Columns, folder: Path | None) -> Row:
    """Read question and reference that are encrypted with `canary`, or with its digest (BrowseComp)."""
    canary = _text(row["canary"]).encode()
    for key in (hashlib.sha256(canary).digest(), canary):
        with suppress(binascii.Error, UnicodeDecodeError):
            hidden = (base64.b64decode(_text(row[one]), validate=True) for one in at[:2])
            query, answer = (
                bytes(byte ^ key[place % len(key)] for place, byte in enumerate(text)).decode()
                for text in hidden
            )
            if query.isprintable() or "\n" in query:
                return {"query": query, "answer": answer.strip()}
    raise BadEntry(f"`{at.query}` and `{at.answer}` cannot be decrypted with `canary`")


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
    return {"query": query, "answer": _pairs(decoded(row[at.answer]))}


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
    pairs: dict[str, Any] = {
        "inputs": [test["input"] for test in tests],
        "outputs": [test["output"] for test in tests],
    }
    pairs["fn_name"] = decoded(row.get("metadata")).get("func_name")
    return {"query": _with_starter(_text(row[at.query]), row), "answer": _pairs(pairs)}


def _with_starter(query: str, row: Row) -> str:
    starter = row.get("starter_code")
    return f"{query}\n\nBegin with this code:\n{starter}" if starter else query


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


def _query(row: Row, at: Columns) -> str | None:
    """Return the question, behind the passage that it is about; None if it stays where it is."""
    found = [_value(row, column) for column in at.query.split(" & ") if column]
    return "\n\n".join(_text(one) for one in found if one not in (None, "")) or None


def decoded(value: Any) -> Mapping[str, Any]:
    """Return the object that a value is, itself or as JSON; an empty one for other values."""
    if isinstance(value, str) and value.startswith("{"):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    return value if isinstance(value, Mapping) else {}


def _value(row: Row, column: str) -> Any:
    value: Any = row
    for name in column.split("."):
        value = decoded(value).get(name)
    return value


def _text(value: object) -> str:
    """Return a reference as text; 27.0 is 27, as number columns hold floats."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if (
        isinstance(value, bool)
        or not isinstance(value, str | int | float)
        or not str(value).strip()
    ):
        raise BadEntry(f"expected text or a number, found {value!r:.{_MAX_SHOWN}}")
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
