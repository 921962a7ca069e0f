"""Files of anybody, as hypothesis thinks them up: each is read, or refused in one line."""

import json
from pathlib import Path

import pytest
from hypothesis import strategies as st
from support.fuzzing import TryCases

from agentrl.config.sections import DataSection
from agentrl.datasets.question_files import QuestionFile
from agentrl.errors import ConfigError, DatasetError
from agentrl.store.documents.export_files import read_documents

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    ["q", "question", "query", "answer", "id", "tags", "images", "image", "scorer", "messages"]
)
ENTRIES = st.dictionaries(FIELDS | st.text(max_size=5), VALUES, max_size=5)
LINES = st.lists(ENTRIES.map(json.dumps) | st.text(max_size=60), max_size=4).map("\n".join)
DOCUMENTS = st.dictionaries(
    st.sampled_from(
        ["_id", "$code", "$set", "$oid", "$date", "$binary", "$numberLong", "$ref", "x"]
    ),
    VALUES,
    max_size=4,
)


QUESTION_FILES = LINES.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(
    max_size=200
)
EXPORTED_FILES = (
    st.lists((DOCUMENTS | ENTRIES).map(json.dumps) | st.text(max_size=60), max_size=3)
    .map("\n".join)
    .map(lambda text: text.encode("utf-8", "surrogatepass"))
) | st.binary(max_size=200)


@pytest.mark.fuzz(50)
def test_any_question_file_is_read_or_refused_in_one_line(
    tmp_path: Path, try_cases: TryCases
) -> None:
    path = tmp_path / "d.jsonl"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        problem = "it was read"
        try:
            with QuestionFile(path, DataSection()) as questions:
                assert len(list(questions)) > 0
        except DatasetError as error:
            problem = str(error)
        assert problem

    try_cases(check, content=QUESTION_FILES)


@pytest.mark.fuzz(50)
def test_any_exported_file_is_read_or_refused_in_one_line(
    tmp_path: Path, try_cases: TryCases
) -> None:
    path = tmp_path / "tasks.jsonl"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        problem = ""
        try:
            for document in read_documents(path):
                assert isinstance(document["_id"], str | int)
        except ConfigError as error:
            problem = str(error)
        assert "\n" not in problem

    try_cases(check, content=EXPORTED_FILES)
