import gzip
import importlib
import json
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from harness.attacks.files import (
    endless_element,
    endless_line,
    parquet_bomb,
    pipe,
    repeated_cells,
)
from support.tool_server import picture

from agentrl.config.sections import DataSection
from agentrl.datasets import entries
from agentrl.datasets.entries import read_entries
from agentrl.datasets.question_files import QuestionFile, load_questions
from agentrl.datasets.task_stream import tasks_from_questions, train_tasks
from agentrl.errors import DatasetError
from agentrl.rewards import GroundTruth
from agentrl.schema import MCPTask
from agentrl.schema.image import image_from_bytes
from agentrl.store import TrajectoryStore

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


def write_hub_splits(path: Path) -> Path:
    module = importlib.import_module("datasets")
    splits = {"train": [{"q": "no"}], "test": ROWS}
    folder = str(path).partition(":")[0]
    module.DatasetDict({k: module.Dataset.from_list(v) for k, v in splits.items()}).save_to_disk(
        folder
    )
    return path


def write_gzip(path: Path) -> Path:
    path.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)))
    return path


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("d.jsonl", write_jsonl),
        ("d.json", write_json),
        ("d.parquet", write_parquet),
        ("d.jsonl.gz", write_gzip),
        ("folder", write_hub_folder),
        ("splits:test", write_hub_splits),
    ],
)
def test_every_format_gives_the_same_questions(
    tmp_path: Path, name: str, write: Callable[[Path], Path]
) -> None:
    questions = load_questions(write(tmp_path / name), DEFAULTS)
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
    assert (first.query, first.answer, first.scorer) == ("Is it,\nreally?", "0", "exact")
    assert first.tags == ("easy",)
    assert (second.answer, second.scorer, second.tags) == ("false", "em", ())
    path.write_text("question,answer\nWhy?,1\nWho?,1,2\n,3\n")
    with pytest.raises(DatasetError, match=r"line 3: more cells .*; line 4: no question"):
        load_questions(path, DEFAULTS)


def test_a_byte_order_mark_blank_lines_and_windows_line_ends_are_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"q": "A"}\r\n\r\n{"q": "B"}\r\n\n')
    assert [(q.id, q.query) for q in load_questions(path, DEFAULTS)] == [
        ("line1", "A"),
        ("line3", "B"),
    ]


def test_tables_may_be_tabbed_compressed_and_spaced(tmp_path: Path) -> None:
    (tmp_path / "d.tsv").write_text("question\t answer\nWhy?\t1,5\n")
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(b'question, answer\nWhy?,"1,5"\n'))
    for name in ("d.tsv", "d.csv.gz"):
        (question,) = load_questions(tmp_path / name, DEFAULTS)
        assert (question.query, question.answer) == ("Why?", "1,5")
    (tmp_path / "d.csv").write_text("question;answer\nWhy?;1\n")
    with pytest.raises(DatasetError, match="columns are separated by semicolons; a CSV file uses"):
        load_questions(tmp_path / "d.csv", DEFAULTS)


def test_a_damaged_compressed_file_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"q": "A"}\n' * 1000)
    for content in (whole[:-20], b"no gzip", whole[:15] + b"xxxx" + whole[19:]):
        (tmp_path / "d.jsonl.gz").write_bytes(content)
        with pytest.raises(DatasetError, match=r"d\.jsonl\.gz: "):
            load_questions(tmp_path / "d.jsonl.gz", DEFAULTS)


async def test_values_of_tables_become_answers_that_can_be_stored(
    tmp_path: Path, store: TrajectoryStore
) -> None:
    pa = importlib.import_module("pyarrow")
    nan = float("nan")
    columns: dict[str, Any] = {
        "id": [1.0, nan, 3.0],
        "q": ["A", "B", "C"],
        "tag": ["x", None, ""],
        "scorer": ["exact", None, "em"],
    }
    for answers, expected in (
        (["a", "", None], (("a",), ("",), ())),
        ([7.0, nan, 0.0], (("7",), (), ("0",))),
        ([0, None, 2**62], (("0",), (), (str(2**62),))),
        ([True, False, None], (("true",), ("false",), ())),
        ([Decimal("1.50"), None, Decimal("0.00")], (("1.50",), (), ("0.00",))),
        ([date(2020, 1, 31), None, None], (("2020-01-31",), (), ())),
        ([["a", "ü"], [], None], (('["a", "ü"]',), ("[]",), ())),
        ([{"k": 1}, None, None], (('{"k": 1}',), (), ())),
    ):
        table = pa.table({**columns, "answer": answers})
        importlib.import_module("pyarrow.parquet").write_table(table, tmp_path / "d.parquet")
        questions = load_questions(tmp_path / "d.parquet", DEFAULTS)
        assert [q.id for q in questions] == ["1", "row2", "3"]
        assert [q.tags for q in questions] == [("x",), (), ()]
        await store.tasks.add(tasks_from_questions(questions, "train"))
        accepted = []
        for question in questions:
            task = await store.tasks.get(f"train/0/{question.id}")
            assert isinstance(task, MCPTask)
            accepted.append(GroundTruth.of(task).accepted)
        assert tuple(accepted) == expected
        await store.drop_database()


def test_what_cannot_be_stored_is_a_bad_line(tmp_path: Path) -> None:
    deep = "[" * 60 + "]" * 60
    for line, problem in (
        (f'{{"q": "A", "answer": {deep}}}', "nested deeper than 50 levels"),
        (f'{{"q": "A", "answer": {"[" * 10**5}', "nested too deeply"),
        (
            json.dumps({"q": "A" * 4_000_000}),
            "4,000,000 characters of text; the limit is 3,000,000",
        ),
        ('{"q": "  "}', r"no question in .*\(found: q\)"),
        ('{"q": ["a", "b"]}', r"query must be text, found list"),
    ):
        (tmp_path / "d.jsonl").write_text(line + "\n")
        with pytest.raises(DatasetError, match=f"line 1: .*{problem}"):
            load_questions(tmp_path / "d.jsonl", DEFAULTS)


async def test_text_that_is_no_unicode_is_stored_as_it_is_written(
    tmp_path: Path, store: TrajectoryStore
) -> None:
    line = '{"id": "\\ud800", "q": "\\udc00 A", "answer": 1' + "0" * 30 + "}\n"
    (tmp_path / "d.jsonl").write_text(line)
    await store.tasks.add(
        tasks_from_questions(load_questions(tmp_path / "d.jsonl", DEFAULTS), "train")
    )
    (task,) = [task async for task in store.tasks.find()]
    assert isinstance(task, MCPTask)
    assert (task.id, task.query) == ("train/0/\\ud800", "\\udc00 A")
    assert GroundTruth.of(task).accepted == (str(10**30),)


def test_images_of_a_hub_data_set_are_the_bytes_that_it_holds(tmp_path: Path) -> None:
    module = importlib.import_module("datasets")
    image = {"bytes": picture(4), "path": None}
    rows = module.Dataset.from_list([{"q": "A", "image": image, "n": 1}])
    rows.cast_column("image", module.Image()).save_to_disk(str(tmp_path / "seen"))
    (question,) = load_questions(tmp_path / "seen", DEFAULTS)
    assert question.images == (image_from_bytes(picture(4)).data_url,)


def test_a_directory_of_data_files_is_a_data_set(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl")
    assert [q.id for q in load_questions(folder, DEFAULTS)] == ["a", "b"]
    monkeypatch.chdir(folder)
    assert len(load_questions(Path(), DEFAULTS)) == 2


def test_a_directory_of_csv_files_is_read_without_declared_columns(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("query,answer\nA,1\n")
    assert [q.query for q in load_questions(tmp_path, DEFAULTS)] == ["A"]


@pytest.mark.parametrize("is_current", [False, True])
def test_a_directory_of_empty_files_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_current: bool
) -> None:
    (tmp_path / "train.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    source = Path() if is_current else tmp_path
    with pytest.raises(
        DatasetError, match=r"^[^\n]*: the data files in it are empty; give [^\n]*$"
    ):
        load_questions(source, DEFAULTS)


def test_a_name_that_no_hub_knows_is_refused_with_the_reason() -> None:
    # Apart, because the library reads the switch when it is imported.
    code = (
        "from pathlib import Path\n"
        "from agentrl.datasets.entries import read_entries\n"
        "next(read_entries(Path('nobody/nothing@main:train')))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert "DatasetError: nobody/nothing@main:train: cannot load the dataset" in found.stderr


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
    with pytest.raises(
        DatasetError, match=rf"needs {package}.*pip install 'agentrl-mongo\[data\]'"
    ):
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
        ('[{"q": "a"}] x', "text after the list"),
        ('[{"q": "a"}, 12]', "entry 2: expected a JSON object"),
        ('[{"q": "a"},', "not valid JSON"),
        ("[]", "contains no questions"),
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


def test_many_bad_lines_are_counted_and_a_few_kinds_named(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("no\n" * 100 + '{"q": "x", "id": "1"}\n{"q": "y", "id": 1}\n')
    with pytest.raises(
        DatasetError, match=r"line 1: [^;]*; line 102: id .* line 101 \(and 99 more\)$"
    ):
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
    with pytest.raises(DatasetError, match=r"line 2001: id 'q3' is already used in line 4"):
        load_questions(tmp_path / "d.jsonl", DEFAULTS)


@pytest.mark.slow
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


@pytest.mark.parametrize("make", [pipe, lambda _: Path("/dev/zero")])
def test_a_device_or_a_pipe_is_refused(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    with pytest.raises(DatasetError, match="devices and pipes are not supported"):
        list(read_entries(make(tmp_path)))


@pytest.mark.parametrize("text", ["x" * 5000, '["' + "x" * 200_000])
def test_an_entry_beyond_the_bound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(entries, "_MAX_ENTRY_CHARS", 4096)
    path = tmp_path / "q.jsonl"
    path.write_text(text)
    with pytest.raises(DatasetError, match="line 1: longer than"):
        list(read_entries(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (endless_line, "line 1: longer than 128 Mi characters"),
        (endless_element, "line 1: longer than 128 Mi characters"),
        (parquet_bomb, "decompresses to 1600 MiB, more than 500 times its size"),
        (repeated_cells, "row 1: 33,554,432 characters of text; the limit is 3,000,000"),
    ],
)
def test_a_file_without_end_is_refused_in_one_line_and_little_memory(
    tmp_path: Path, make: Callable[[Path], Path], reason: str
) -> None:
    path = make(tmp_path)
    script = (
        "import re, sys; from agentrl.datasets.question_files import load_questions;"
        "from agentrl.errors import DatasetError; from pathlib import Path\n"
        "from agentrl.config.sections import DataSection\n"
        "Path('/proc/self/clear_refs').write_text('5')\n"  # it has its parent's peak
        "try: load_questions(Path(sys.argv[1]), DataSection())\n"
        "except DatasetError as error: print(error)\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60
    )
    said, kilobytes = run.stdout.splitlines()
    assert re.search(reason, said), run.stderr
    assert int(kilobytes) < 2_000_000


@pytest.mark.parametrize("form", ["%s\n", "[%s]"])
def test_a_number_of_five_thousand_digits_is_refused(tmp_path: Path, form: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(form % ('{"question": "x", "answer": ' + "9" * 5000 + "}"))
    with pytest.raises(DatasetError, match="a number has too many digits"):
        load_questions(path, DataSection())


@pytest.mark.parametrize("kind", ["/dev/zero", "pipe", "folder"])
def test_an_image_that_is_no_file_is_a_bad_line(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question": "x", "answer": "y", "image": kind}))
    with pytest.raises(DatasetError, match=f"line 1: image '{kind}': (not a file|leads out of)"):
        load_questions(path, DataSection())
