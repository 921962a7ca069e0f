import importlib
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.sections import DataSection
from agentrl.errors import DatasetError
from agentrl.rollout.datasets import QuestionFile, load_questions, train_tasks
from agentrl.rollout.entries import read_entries

DEFAULTS = DataSection()
ROWS: list[dict[str, Any]] = [
    {"id": "a", "question": "Is it?", "answer": 0, "scorer": "exact", "tags": ["easy", "price"]},
    {"id": "b", "question": 'Or,\n"not"?', "answer": 1, "scorer": "math", "tags": ["hard"]},
]


def write_jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def write_json(path: Path) -> Path:
    path.write_text("\ufeff \n" + json.dumps(ROWS, indent=2))
    return path


def write_parquet(path: Path) -> Path:
    pa = importlib.import_module("pyarrow")
    importlib.import_module("pyarrow.parquet").write_table(pa.Table.from_pylist(ROWS), path)
    return path


def write_hub_folder(path: Path) -> Path:
    importlib.import_module("datasets").Dataset.from_list(ROWS).save_to_disk(str(path))
    return path


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("d.jsonl", write_jsonl),
        ("d.json", write_json),
        ("d.parquet", write_parquet),
        ("folder", write_hub_folder),
    ],
)
def test_every_format_gives_the_same_questions(
    tmp_path: Path, name: str, write: Callable[[Path], Path]
) -> None:
    questions = load_questions(write(tmp_path / name), DEFAULTS, {"exact", "math"})
    assert [(q.id, q.query, q.answer) for q in questions] == [
        ("a", "Is it?", 0),
        ("b", 'Or,\n"not"?', 1),
    ]
    assert questions[0].tags == ("easy", "price")


def test_csv_cells_are_text_and_empty_ones_no_value(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text(
        'id,question,answer,scorer,tag\na,"Is it,\nreally?",0,,easy\nb,Not?,false,em,\n'
    )
    first, second = load_questions(path, DEFAULTS)
    assert (first.query, first.answer, first.scorer) == ("Is it,\nreally?", "0", "agentcpm")
    assert first.tags == ("easy",)
    assert (second.answer, second.scorer, second.tags) == ("false", "em", ())
    path.write_text("question,answer\nWhy?,1\nWho?,1,2\n,3\n")
    with pytest.raises(DatasetError, match=r"line 3: more cells .*; line 4: no question"):
        load_questions(path, DEFAULTS)


def test_a_directory_of_data_files_is_a_data_set(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl")
    assert [q.id for q in load_questions(folder, DEFAULTS)] == ["a", "b"]


def test_a_name_that_no_hub_knows_is_refused_with_the_reason() -> None:
    # Apart, because the library reads the switch when it is imported.
    code = (
        "from pathlib import Path\n"
        "from agentrl.rollout.entries import read_entries\n"
        "next(read_entries(Path('nobody/nothing@main:train')))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=25,
    )
    assert "DatasetError: nobody/nothing@main:train: the data set cannot be loaded" in found.stderr


@pytest.mark.parametrize(
    ("name", "package"), [("d.parquet", "pyarrow"), ("owner/name", "datasets")]
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    def refuse(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named '{package}'", name=package)
        return original(module, *args, **kwargs)

    original = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(DatasetError, match=rf"needs {package}.*pip install 'agentrl\[data\]'"):
        next(read_entries(Path(name)))


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    path.write_bytes(b"PAR1 not at all")
    with pytest.raises(DatasetError, match="not a readable Parquet file"):
        load_questions(path, DEFAULTS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"q": "a"}, {"q": ]', "line 1: not valid JSON"),
        ('[{"q": "a"}\n{"q": "b"}]', "line 2: not valid JSON: expected , or ]"),
        ('[{"q": "a"}] x', "text behind the list"),
        ('[{"q": "a"}, 12]', "entry 2: expected a JSON object"),
        ('[{"q": "a"},', "not valid JSON"),
        ("[]", "holds no questions"),
    ],
)
def test_a_broken_json_list_is_refused_where_it_breaks(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "d.json"
    path.write_text(text)
    with pytest.raises(DatasetError, match=message.replace("[", r"\[")):
        load_questions(path, DEFAULTS)


def test_a_json_list_is_decoded_across_the_edges_of_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    rows = [{"q": "é\\" * (n % 977), "n": n} for n in range(900)]
    path.write_text(json.dumps(rows, ensure_ascii=False))
    assert [entry for _, entry in read_entries(path)] == rows


def test_many_bad_lines_are_counted_and_a_few_named(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("no\n" * 100 + '{"q": "x", "id": "1"}\n{"q": "y", "id": 1}\n')
    with pytest.raises(DatasetError, match=r"line 1: .* line 3: .*\(and 98 more\)"):
        load_questions(path, DEFAULTS)


def write_many(path: Path, count: int) -> None:
    with path.open("w") as file:
        file.writelines(f'{{"id": "q{n}", "q": "{"what " * 20}{n}?"}}\n' for n in range(count))


def peak_of(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_stays_flat_while_a_large_file_is_checked_and_asked(tmp_path: Path) -> None:
    count = 6000
    write_many(tmp_path / "d.jsonl", count)
    config = DataSection(train_file=tmp_path / "d.jsonl", num_train_epochs=2)
    asked = 0

    def ask() -> None:
        nonlocal asked
        asked = sum(1 for _ in train_tasks(config, seed=1))

    peak = peak_of(ask)
    assert asked == 2 * count
    # The file's texts alone are 700 kB.
    assert peak < 400_000


def test_a_repeated_id_far_away_is_found(tmp_path: Path) -> None:
    write_many(tmp_path / "d.jsonl", 2000)
    with (tmp_path / "d.jsonl").open("a") as file:
        file.write('{"id": "q3", "q": "again?"}\n')
    with pytest.raises(DatasetError, match=r"line 2001: id 'q3' was used before, in line 4"):
        load_questions(tmp_path / "d.jsonl", DEFAULTS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_million_questions_are_checked_in_little_memory(tmp_path: Path) -> None:
    write_many(tmp_path / "d.jsonl", 1_000_000)

    def check() -> None:
        with QuestionFile(tmp_path / "d.jsonl", DEFAULTS) as questions:
            assert len(questions) == 1_000_000
            assert questions[999_999].id == "q999999"

    assert peak_of(check) < 100 * 2**20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_million_tasks_are_asked_in_little_memory(tmp_path: Path) -> None:
    write_many(tmp_path / "d.jsonl", 1_000_000)
    asked = bytearray(1_000_000)

    def ask() -> None:
        for task in train_tasks(DataSection(train_file=tmp_path / "d.jsonl"), seed=1):
            asked[int(task.dataset_id[1:])] += 1

    assert peak_of(ask) < 100 * 2**20
    assert asked.count(1) == 1_000_000


def test_an_abandoned_epoch_leaves_nothing_open(tmp_path: Path) -> None:
    write_many(tmp_path / "d.jsonl", 10)
    tasks: Iterator[Any] = train_tasks(DataSection(train_file=tmp_path / "d.jsonl"), seed=1)
    next(tasks)
    del tasks  # an open spool would be reported as a leaked file
