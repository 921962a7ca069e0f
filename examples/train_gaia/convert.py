"""Converts GAIA's `metadata.jsonl` to questions for AgentRL.

    python examples/train_gaia/convert.py gaia/2023/validation/metadata.jsonl \
        --files_url http://127.0.0.1:9000 --out gaia/validation.jsonl

Users download the data set themselves: it is gated, and its authors ask others not to republish it in
a form that crawlers can read. A question with an attached file contains the file's address for the
agent's tools.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class BadMetadata(Exception):
    """Names an unusable line of the metadata and the reason."""


def read_metadata(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a metadata file.

    Raises:
        BadMetadata: a line is not a JSON object, or lacks a field.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadMetadata(f"{path}: line {number}: not valid JSON: {error.msg}") from None
        missing = [name for name in ("task_id", "Question", "Level") if name not in entry]
        if missing:
            raise BadMetadata(f"{path}: line {number}: no field {missing[0]!r}")
        yield entry


def to_question(entry: dict[str, Any], files: str | None) -> dict[str, Any] | None:
    """Return one line of a question file; None if the answer is unpublished (test split)."""
    answer = entry.get("Final answer")
    if answer in (None, "", "?"):
        return None
    query, file_name = entry["Question"], entry.get("file_name") or ""
    if file_name:
        if files is None:
            raise BadMetadata(
                f"question {entry['task_id']} has the file {file_name}; say by --files_url where "
                "the agent's tools find the files"
            )
        query += f"\n\nThe file that belongs to the question: {files.rstrip('/')}/{file_name}"
    return {
        "id": entry["task_id"],
        "query": query,
        "answer": str(answer),
        "scorer": "gaia",
        "answer_schema": "answer",
        "tags": [f"level{entry['Level']}", "file" if file_name else "no_file"],
    }


def main() -> int:
    """Convert, and print the number of questions of each level."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("metadata", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--files_url", help="address or folder where tools find attached files")
    arguments = parser.parse_args()
    try:
        entries = list(read_metadata(arguments.metadata))
        questions = [to_question(entry, arguments.files_url) for entry in entries]
    except (BadMetadata, OSError) as error:
        sys.stderr.write(f"convert: {error}\n")
        return 2
    kept = [question for question in questions if question is not None]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(
        "".join(json.dumps(question, ensure_ascii=False) + "\n" for question in kept),
        encoding="utf-8",
    )
    levels = Counter(question["tags"][0] for question in kept)
    by_level = ", ".join(f"{count} of {level}" for level, count in sorted(levels.items()))
    sys.stdout.write(
        f"{len(kept)} questions in {arguments.out} ({by_level}); "
        f"{len(questions) - len(kept)} without a published answer left out\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
