import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.tool_server import picture

from agentrl.config.sections import DataSection
from agentrl.datasets.question_files import QuestionFile, load_questions
from agentrl.datasets.task_stream import tasks_from_questions
from agentrl.errors import DatasetError
from agentrl.rewards import GroundTruth, MCPScorerFactory
from agentrl.schema.image import image_from_bytes, question_content

DEFAULTS = DataSection(default_scorer="exact", system_prompt="Be brief.")


def write_lines(path: Path, *entries: Any) -> Path:
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_documented_fields_are_read(tmp_path: Path) -> None:
    entry = {
        "id": "q1",
        "query": "How many?",
        "answer": "3",
        "aug_answers": ["three"],
        "scorer": "math",
        "answer_schema": "boxed",
        "system_prompt": "Count.",
    }
    (question,) = load_questions(write_lines(tmp_path / "d.jsonl", entry), DEFAULTS)
    assert (question.id, question.query, question.answer) == ("q1", "How many?", "3")
    assert question.aug_answers == ("three",)
    assert (question.scorer, question.answer_schema) == ("math", "boxed")
    assert question.system_prompt == "Count."


def test_defaults_fill_what_an_entry_leaves_out(tmp_path: Path) -> None:
    (question,) = load_questions(write_lines(tmp_path / "d.jsonl", {"q": "Why?"}), DEFAULTS)
    assert (question.scorer, question.answer_schema) == ("exact", "answer")
    assert question.system_prompt == "Be brief."
    assert question.answer is None


@pytest.mark.parametrize(
    "entry",
    [
        {"query": "Q"},
        {"q": "Q"},
        {"Question": "Q"},
        {"question": "Q"},
        {"content": "Q"},
        {"instruction": "Q"},
        {"traj_question": "Q"},
        {"query_prompt": "Q"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Q"}]},
        {"raw": {"messages": [{"role": "user", "content": "Q"}]}},
    ],
)
def test_synonyms_of_the_question_are_accepted(tmp_path: Path, entry: dict[str, Any]) -> None:
    (question,) = load_questions(write_lines(tmp_path / "d.jsonl", entry), DEFAULTS)
    assert question.query == "Q"


def test_rows_of_trl_and_verl_are_read(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q"}]
    verl_row = {
        "data_source": "gsm8k",
        "prompt": talk,
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"task_id": "t1", "split": "train"},
    }
    path = write_lines(
        tmp_path / "d.jsonl",
        verl_row,
        {"prompt": "Q", "solution": "4", "id": "t2"},
        {"prompt": talk, "ground_truth": "4", "system_prompt": "Think.", "id": "t3"},
    )
    questions = list(load_questions(path, DEFAULTS))
    assert [(one.id, one.query, one.answer) for one in questions] == [
        ("t1", "Q", "4"),
        ("t2", "Q", "4"),
        ("t3", "Q", "4"),
    ]
    assert [one.system_prompt for one in questions] == [
        "Be brief.",
        DEFAULTS.system_prompt or "",
        "Think.",
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"answer": 0},
        {"a": 0},
        {"Final answer": 0},
        {"Final Answer": 0},
        {"Final sample answer": 0},
        {"expected_answer": 0},
        {"raw": {"expected_answer": 0}},
        {"raw": {"answer": 0}},
    ],
)
def test_synonyms_of_the_answer_are_accepted_and_zero_is_kept(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    (question,) = load_questions(write_lines(tmp_path / "d.jsonl", {"q": "Q", **fields}), DEFAULTS)
    assert question.answer == 0


def test_false_is_an_answer(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", {"q": "Q", "answer": False})
    assert load_questions(path, DEFAULTS)[0].answer is False


def test_a_json_list_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps([{"id": 7, "q": "A"}, {"q": "B"}], indent=1))
    questions = load_questions(path, DEFAULTS)
    assert [question.id for question in questions] == ["7", "entry2"]


def test_bad_lines_are_refused_with_their_numbers(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "d.jsonl", {"q": "A"}, "{broken", "", {"answer": 1}, ["no object"], {"q": 5}
    )
    with pytest.raises(DatasetError) as caught:
        load_questions(path, DEFAULTS)
    text = str(caught.value)
    assert "\n" not in text
    assert "line 2: not valid JSON" in text
    assert "line 4: no question" in text
    assert "(found: answer)" in text
    assert "line 5: expected a JSON object" in text
    assert "(and 1 more)" in text


def test_a_repeated_id_names_both_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", {"id": "x", "q": "A"}, {"id": "x", "q": "B"})
    with pytest.raises(DatasetError, match=r"line 2: id 'x' is already used in line 1"):
        load_questions(path, DEFAULTS)


def test_an_unknown_scorer_is_refused_before_sampling(tmp_path: Path) -> None:
    check = MCPScorerFactory.check_question
    path = write_lines(tmp_path / "d.jsonl", {"q": "A", "scorer": "exakt"})
    with pytest.raises(DatasetError, match=r"line 1: unknown scorer 'exakt'; did you mean 'exact'"):
        load_questions(path, DEFAULTS, check)


@pytest.mark.parametrize("scorer", ["exact", "em", "math", "gaia"])
@pytest.mark.parametrize("answers", [{"answer": ["a", "b"]}, {"answer": "a", "aug_answers": [{}]}])
def test_scorers_that_compare_text_refuse_lists_and_objects(
    tmp_path: Path, scorer: str, answers: dict[str, Any]
) -> None:
    path = write_lines(tmp_path / "d.jsonl", {"q": "A", "scorer": scorer, **answers})
    with pytest.raises(DatasetError, match=f"line 1: scorer '{scorer}' compares text, and an ans"):
        load_questions(path, DEFAULTS, MCPScorerFactory.check_question)


@pytest.mark.parametrize("scorer", ["exact", "em", "math", "gaia", "agentcpm", "asearcher"])
def test_a_question_without_a_reference_is_refused_where_its_scorer_compares(
    tmp_path: Path, scorer: str
) -> None:
    check = MCPScorerFactory.check_question
    entries: list[dict[str, Any]] = [
        {"q": "A", "answer": 0},
        {"q": "B", "aug_answers": ["b"]},
        {"q": "C", "answer": ""},
    ]
    path = write_lines(tmp_path / "d.jsonl", *({**entry, "scorer": scorer} for entry in entries))
    assert len(load_questions(path, DEFAULTS, check)) == 3
    write_lines(path, {"q": "A", "answer": None, "scorer": scorer})
    with pytest.raises(DatasetError, match=f"line 1: scorer '{scorer}' needs a reference answer"):
        load_questions(path, DEFAULTS, check)


@pytest.mark.parametrize("schema", ["a b", "<answer>", "1st"])
def test_an_answer_schema_that_is_no_tag_is_refused_before_sampling(
    tmp_path: Path, schema: str
) -> None:
    path = write_lines(tmp_path / "d.jsonl", {"q": "A", "answer_schema": schema})
    with pytest.raises(DatasetError, match=r"line 1: answer_schema .*: expected `boxed`"):
        load_questions(path, DEFAULTS)
    write_lines(path, *({"q": "A", "answer_schema": s} for s in ("boxed", "final-answer", "a.b")))
    assert len(load_questions(path, DEFAULTS)) == 3


def test_a_missing_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="No such file"):
        load_questions(tmp_path / "none.jsonl", DEFAULTS)
    with pytest.raises(DatasetError, match="contains no questions"):
        load_questions(write_lines(tmp_path / "d.jsonl"), DEFAULTS)


def test_images_are_read_in_every_form(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(picture(1))
    inline = image_from_bytes(picture(2)).data_url
    web = "https://example.org/a.png"
    said = [
        {"type": "image_url", "image_url": {"url": inline}},
        {"type": "text", "text": "What is "},
        {"type": "text", "text": "this?"},
    ]
    entries = [
        {"query": "What is this?", "images": ["one.png", web]},
        {"query": "What is this?", "image": inline},
        {"messages": [{"role": "user", "content": said}]},
    ]
    path = write_lines(tmp_path / "d.jsonl", *entries)
    with QuestionFile(path, DEFAULTS) as questions:
        assert questions.has_images
        assert [question.query for question in questions] == ["What is this?"] * 3
        first = image_from_bytes(picture(1)).data_url
        assert [q.images for q in questions] == [(first, web), (inline,), (inline,)]


def test_images_stand_where_the_text_marks_them(tmp_path: Path) -> None:
    web = "https://example.org/{}.png".format
    picture_part = {"type": "image"}
    entries: list[dict[str, Any]] = [
        {
            "prompt": [{"role": "user", "content": "Is <image> <image>?"}],
            "images": [web(1), web(2)],
        },
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Is "},
                        picture_part,
                        {"type": "text", "text": " red?"},
                    ],
                }
            ],
            "images": [web(1)],
        },
        {"query": "<image>Which?", "images": [web(1)]},
        {"query": "What is <image> in HTML?"},
        {"query": "Which?", "images": [web(1), web(2)]},
    ]
    shown = [
        ["Is ", web(1), " ", web(2), "?"],
        ["Is ", web(1), " red?"],
        [web(1), "Which?"],
        "What is <image> in HTML?",
        [web(1), web(2), "Which?"],
    ]
    with QuestionFile(write_lines(tmp_path / "d.jsonl", *entries), DEFAULTS) as questions:
        for question, expected in zip(questions, shown, strict=True):
            content = question_content(question.query, question.images)
            parts = (
                content
                if isinstance(content, str)
                else [
                    part["text"] if part["type"] == "text" else part["image_url"]["url"]  # type: ignore[index]
                    for part in content
                ]
            )
            assert parts == expected
    path = write_lines(tmp_path / "d.jsonl", {"q": "A <image> and <image>", "image": web(1)})
    with pytest.raises(DatasetError, match="line 1: 2 marks <image> in the question and 1 images"):
        load_questions(path, DEFAULTS)


def test_images_that_cannot_be_had_are_named_by_their_line(tmp_path: Path) -> None:
    (tmp_path / "page.png").write_text("<html>")
    for image, problem in (
        ("none.png", "image 'none.png': No such file"),
        ("page.png", "image 'page.png': not PNG"),
        ("data:image/png;base64,AA", "not PNG|not base64"),
        (7, "an image must be a URL or a file, found int"),
    ):
        path = write_lines(tmp_path / "d.jsonl", {"q": "A"}, {"q": "B", "images": [image]})
        with pytest.raises(DatasetError, match=f"line 2: .*({problem})"):
            load_questions(path, DEFAULTS)


def test_keys_that_nothing_reads_are_listed_with_what_was_meant(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "d.jsonl",
        {"id": "a", "query": "Q", "anwser": 1, "scorrer": "exact"},
        {"id": "b", "query": "Q", "answer": 1, "tools": ["add"], "Answer_schema": "boxed"},
    )
    with QuestionFile(path, DEFAULTS) as questions:
        assert list(questions.unread_keys) == [
            "anwser (did you mean answer?)",
            "scorrer (did you mean scorer?)",
            "tools",
            "Answer_schema (did you mean answer_schema?)",
        ]


def test_columns_that_nothing_reads_are_carried_with_the_question(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "d.jsonl",
        {"query": "Q", "answer": 1, "user": "mara", "world": {"db": [1, None]}, "gap": None},
        {"query": "R", "answer": 1, "user": "noor", "page": "x" * 200_000},
    )
    with QuestionFile(path, DEFAULTS) as questions:
        assert [question.columns for question in questions] == [
            {"user": "mara", "world": {"db": [1, None]}},
            {"user": "noor"},
        ]
        assert questions.common_columns == {"user"}
        assert list(questions.columns_left_out) == ["page"]
        (first, _) = tasks_from_questions(questions, "train")
    assert GroundTruth.of(first).columns == {"user": "mara", "world": {"db": [1, None]}}


@pytest.mark.parametrize("field", ["question", "system_prompt"])
def test_a_text_beyond_the_limit_is_refused_before_it_is_searched(
    tmp_path: Path, field: str
) -> None:
    path = tmp_path / "q.jsonl"
    row = {"question": "x", "answer": "y"} | {field: "x" * 2**25}
    path.write_text((json.dumps(row) + "\n") * 3)
    begin = time.thread_time()
    with pytest.raises(DatasetError, match=r"line 1: 33,554,43\d characters of text"):
        load_questions(path, DataSection())
    assert time.thread_time() - begin < 2  # each search takes 6 s


def test_a_long_word_of_a_question_is_searched_once(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question": "follow" * 30_000, "answer": "y"}))
    begin = time.thread_time()
    load_questions(path, DataSection())
    assert time.thread_time() - begin < 1
