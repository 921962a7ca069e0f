"""Small pure functions that read the columns of known data sets; see `row_shapes`."""

import base64
import binascii
import hashlib
import json
import math
import os
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.datasets.entries import BadEntry
from agentrl.datasets.row_files import open_row_file
from agentrl.schema.answer_form import BOXED, find_answer

Row = Mapping[str, Any]

_GSM8K = re.compile(r"^####[ \t]*(\S[^\n]*?)[ \t]*\Z", re.MULTILINE)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".gif", ".webp"})
_TEXT_SUFFIXES = frozenset(
    {".txt", ".csv", ".tsv", ".json", ".jsonl", ".jsonld", ".md", ".py", ".xml", ".html", ".pdb"}
)
_MAX_ATTACHED_BYTES = 100_000
"""Maximum size of an attachment whose text is added to a question."""
_MAX_SHOWN = 80


def first_of(row: Row, *names: str) -> Any:
    """Return the first of these columns that has a value, or None."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def text_of(value: object) -> str:
    """Return a reference as text; 27.0 is 27, as number columns hold floats.

    Raises:
        BadEntry: there is none.
    """
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if (
        isinstance(value, bool)
        or not isinstance(value, str | int | float)
        or not str(value).strip()
    ):
        raise BadEntry(f"a reference answer must be text or a number, found {value!r}")
    return str(value).strip()


def gsm8k_reference(answer: object) -> str | None:
    """Return what follows `####` in the last line of a worked solution, or None."""
    found = _GSM8K.search(answer.rstrip()) if isinstance(answer, str) else None
    return None if found is None else without_thousands(found[1])


def without_thousands(text: str) -> str:
    """Return a number without the separators of its thousands; other text is unchanged."""
    bare = text.strip().removeprefix("$")
    return bare.replace(",", "") if _THOUSANDS.fullmatch(bare) else text.strip()


def math_reference(value: object) -> str:
    """Return the reference of a mathematical problem; a worked solution gives its answer."""
    text = text_of(value)
    worked = gsm8k_reference(text)
    if worked is None and "\\boxed" in text:
        worked = find_answer(text, BOXED)
    return without_thousands(text) if worked is None else worked


def boxed_reference(solution: object) -> str:
    r"""Return the last `\boxed{}` of a worked solution.

    Raises:
        BadEntry: there is none.
    """
    found = find_answer(solution, BOXED) if isinstance(solution, str) else None
    if not found:
        raise BadEntry(
            "no \\boxed{} in `solution`, so the row has no reference (proofs have none): leave it out"
        )
    return found


def listed_aliases(row: Row, aliases: str, reference: str | None = None) -> Row:
    """Return the reference, and the other answers that count as right.

    Args:
        row: holds the columns.
        aliases: a list of texts, or such a list as JSON.
        reference: column of the reference; by default the first alias is.

    Raises:
        BadEntry: no answer is given.
    """
    listed = decoded(row[aliases], aliases)
    own = [] if reference is None else [row.get(reference)]
    texts = [text_of(one) for one in (*own, *listed) if one not in (None, "")]
    if not texts:
        raise BadEntry(f"no answer in `{aliases}`")
    first, *others = dict.fromkeys(texts)
    return {"answer": first, "aug_answers": others}


def target_reference(row: Row) -> Row:
    """Return the answers of `reward_model.ground_truth.target`, one or a list."""
    target = row["answer"]["target"]
    return listed_aliases({"target": target if isinstance(target, list) else [target]}, "target")


def decoded(value: object, column: str) -> list[Any]:
    """Return a list that a column holds, itself or as JSON.

    Raises:
        BadEntry: it holds neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise BadEntry(f"`{column}` is neither a list nor one as JSON") from None
    if not isinstance(value, list):
        raise BadEntry(f"`{column}` must be a list, found {type(value).__name__}")
    return value


def choices(row: Row, question: str, column: str, key: str) -> Row:
    """Return a multiple choice question with its choices, and the letter of the right one.

    Args:
        row: holds the columns.
        question: column of the question.
        column: the choices: a list of texts, or `{"text": [..], "label": [..]}`.
        key: the right one: its index, label, letter or text.

    Raises:
        BadEntry: the choices are malformed, or none is the right one (as in hidden test sets).
    """
    given: Any = row[column]
    labels: Sequence[Any] = ()
    if isinstance(given, dict):
        given, labels = given.get("text"), given.get("label") or ()
    texts = [text_of(text) for text in decoded(given, column)]
    if not 2 <= len(texts) <= len(_LETTERS):
        raise BadEntry(f"{len(texts)} choices in `{column}`; 2 to {len(_LETTERS)} are supported")
    return chosen(
        text_of(row[question]), texts, _index(row[key], texts, list(map(str, labels)), key)
    )


def _index(right: Any, texts: Sequence[str], labels: Sequence[str], key: str) -> int:
    if isinstance(right, int) and not isinstance(right, bool) and 0 <= right < len(texts):
        return right
    if isinstance(right, str):
        for known in (labels, _LETTERS[: len(texts)], texts):
            if right.strip() and right.strip() in list(known):
                return list(known).index(right.strip())
    raise BadEntry(
        f"`{key}` is {right!r}, which is none of the choices (the answers of some test sets are "
        "hidden): use another split"
    )


def chosen(question: str, texts: Sequence[str], right: int) -> Row:
    """Return a question with lettered choices; the letter and the text of the right one are right."""
    lines = "\n".join(f"{letter}. {text}" for letter, text in zip(_LETTERS, texts, strict=False))
    query = f"{question.strip()}\n\n{lines}\n\nAnswer with the letter of the right choice."
    return {"query": query, "answer": _LETTERS[right], "aug_answers": [texts[right]]}


def incorrect_choices(row: Row) -> Row:
    """Return the question of a row whose right and wrong choices are columns (GPQA).

    The order is drawn from the question, so it is the same at each reading and the right choice is
    not always the first.
    """
    right, question = text_of(row["Correct Answer"]), text_of(row["Question"])
    wrong = [
        text_of(row[f"Incorrect Answer {n}"]) for n in (1, 2, 3) if row.get(f"Incorrect Answer {n}")
    ]
    texts = [right, *wrong]
    order = list(range(len(texts)))
    random.Random(question).shuffle(order)
    return {
        **chosen(question, [texts[position] for position in order], order.index(0)),
        "id": row.get("Record ID"),
    }


def function_calls(row: Row, question: str, tools: str, reference: str) -> Row:
    """Return a request with the functions that may be called, and the calls that are right.

    Args:
        row: holds the columns.
        question: column of the request: text, or the conversations of BFCL (only one turn).
        tools: column of the functions.
        reference: column of the calls.

    Raises:
        BadEntry: the reference is missing, or the conversation has several turns.
    """
    if row.get(reference) is None:
        raise BadEntry(
            f"no `{reference}`: BFCL keeps the right calls in a separate file (possible_answer); "
            "add them to the rows by `id`"
        )
    functions = decoded(row[tools], tools)
    query = (
        f"{_request(row[question])}\n\nFunctions that can be called:\n"
        + "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
        + '\n\nAnswer with a JSON list of the calls: [{"name": ..., "arguments": {...}}].'
    )
    return {"query": query, "answer": decoded(row[reference], reference)}


def _request(question: Any) -> str:
    if isinstance(question, str):
        return question
    if len(question) != 1:
        raise BadEntry(
            "a conversation of several turns: only BFCL's categories with one are supported"
        )
    return "\n\n".join(text_of(message.get("content")) for message in question[0])


def browsecomp(row: Row) -> Row:
    """Return question and reference of BrowseComp, which are encrypted with the row's `canary`.

    Raises:
        BadEntry: they cannot be decrypted.
    """
    key = hashlib.sha256(text_of(row["canary"]).encode()).digest()
    texts = {}
    for name, column in (("query", "problem"), ("answer", "answer")):
        try:
            hidden = base64.b64decode(text_of(row[column]), validate=True)
            texts[name] = bytes(
                byte ^ key[at % len(key)] for at, byte in enumerate(hidden)
            ).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise BadEntry(f"`{column}` cannot be decrypted with `canary`") from None
    return texts


def attached(row: Row, folder: Path | None) -> Row:
    """Return a GAIA question with its attachment: an image is shown, a text added.

    Raises:
        BadEntry: the answer is hidden, or the attachment is missing, outside of the folder, or of
            another kind.
    """
    question, answer = text_of(row["Question"]), text_of(row["Final answer"])
    if answer == "?":
        raise BadEntry("`Final answer` is hidden (`?`) in GAIA's test split: use `validation`")
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
    except (BadEntry, UnicodeDecodeError) as error:
        raise BadEntry(f"attachment {place[:_MAX_SHOWN]!r}: {error}") from None
    return {**fields, "query": f"{question}\n\nContent of {name}:\n{text}"}
