"""The arguments of AgentTrainer, as objects and as paths."""

import csv
import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from pydantic import BaseModel
from support.function_agents import by_calls

import __main__
from agentrl.errors import ConfigError, DatasetError
from agentrl.plugins.integrations.agent_worker.references import load_object, reference_to
from agentrl.plugins.integrations.engine_settings import load_settings, refuse_settings_of
from agentrl.plugins.integrations.question_rows import (
    read_questions,
    rewrite_questions,
    scored_by,
    verl_row,
    warn_of_equal_files,
    write_questions,
)
from agentrl.plugins.integrations.reward_functions import check_reward_function
from agentrl.rewards import GroundTruth, Rollout

ROWS = [
    {"id": "a", "query": "How many?", "answer": "0"},
    {"id": "b", "query": "Why?", "answer": "x"},
]
AWORLD_ROW = {
    "prompt": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many?"},
    ],
    "data_source": "gaia",
    "ability": "agi",
    "reward_model": {"style": "GAIA", "ground_truth": "17"},
    "extra_info": {"task_id": "t1", "level": 2},
    "agent_name": "gaia_agent",
}


def as_csv(folder: Path) -> Path:
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def as_json(folder: Path) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps(ROWS))
    return path


def as_jsonl(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def as_parquet(folder: Path) -> Path:
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize(
    "make",
    [as_csv, as_json, as_jsonl, as_parquet, lambda _: Dataset.from_list(ROWS), lambda _: ROWS],
    ids=["csv", "json", "jsonl", "parquet", "Dataset", "list"],
)
def test_a_data_set_may_have_any_form(make: Any, tmp_path: Path) -> None:
    out = tmp_path / "questions.jsonl"
    write_questions(make(tmp_path), out, "train_dataset")
    assert list(read_questions(out)) == ROWS
    made = make(tmp_path)
    if isinstance(made, Path):
        write_questions(str(made), out, "train_dataset")
        assert list(read_questions(out)) == ROWS


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("none.jsonl", "test_dataset: none.jsonl: No such file"),
        (3, "test_dataset: a value of type int is not a dataset; pass the path"),
        ([], "test_dataset: contains no questions"),
        ({"query": ["q"]}, "of type dict is not a list of rows; pass one object per question"),
        (
            Dataset.from_list(ROWS).to_pandas(),
            r"type DataFrame is not a list of rows; .* to_dict\('records'\)",
        ),
        ([{"prompt": 5}], "test_dataset: line 1: no question"),
        ([{"query": "q"}, "text"], "test_dataset: row 2: expected an object"),
        ([{"answer": 1}], "test_dataset: line 1: no question"),
        ([{"query": "q", "answer": {1, 2}}], "test_dataset: row 1: not plain data"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_named(
    dataset: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match=message):
        write_questions(dataset, tmp_path / "out.jsonl", "test_dataset")


def test_rows_of_aworlds_form_become_questions_and_keep_what_a_reward_needs(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    write_questions([AWORLD_ROW], path, "train_dataset")
    (row,) = read_questions(path)
    assert (row["id"], row["messages"]) == ("t1", AWORLD_ROW["prompt"])
    assert row["answer"] == "17"
    rewrite_questions(path, scored_by("mine", "aworld"))
    (row,) = read_questions(path)
    assert row["scorer"] == "mine"
    assert row["answer"] == {
        "data_source": "gaia",
        "ground_truth": "17",
        "extra_info": {"task_id": "t1", "level": 2},
    }


def test_a_row_for_verl_holds_what_verl_reads() -> None:
    row = verl_row({"query": "How many?", "answer": 0, "level": 1}, 4, "train", "shop_loop")
    assert row["prompt"] == [{"role": "user", "content": "How many?"}]
    messages = AWORLD_ROW["prompt"]
    assert verl_row({"messages": messages}, 0, "test", "shop_loop")["prompt"] == messages
    assert row["reward_model"] == {"style": "rule", "ground_truth": "0"}
    assert row["extra_info"] == {"level": 1, "index": 4, "split": "train"}
    assert row["agent_name"] == "shop_loop"


def good(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str == ground_truth)


def scorer(answer: str, truth: Any) -> float:
    return 1.0


def three(data_source: str, solution_str: str, ground_truth: str) -> float:
    return 0.0


class Judge:
    def compare(self, answer: str, truth: Any) -> float:
        return 1.0

    __call__ = compare


def test_a_reward_function_may_be_a_function_or_a_file(tmp_path: Path) -> None:
    found = check_reward_function(good)
    assert (found.form, found.name) == ("aworld", "good")
    assert load_object(found.reference, "reward_func")("", "1", "1") == 1.0
    assert check_reward_function(scorer).form == "scorer"
    assert check_reward_function(by_calls).form == "rollout"
    path = tmp_path / "judge.py"
    path.write_text("import helper\ndef judge(answer, truth): return 1\ndef other(): pass\n")
    (tmp_path / "helper.py").write_text("")
    for text in (str(path), f"{path}:judge"):
        assert check_reward_function(text).reference == f"{path}:judge"


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (three, r"reward_func: three\(.*expected \(data_source, solution_str"),
        (5, "reward_func: a value of type int is not callable"),
        (
            lambda answer, truth: 1.0,
            r"reward_func: a lambda has no importable name.*function \(def\) at module level",
        ),
        (
            partial(scorer, "a"),
            r"reward_func: an object \(partial\) has no importable name, which other",
        ),
        (
            Judge().compare,
            r"reward_func: the method of an object \(Judge\.compare\) has no importable name",
        ),
        (
            Judge(),
            r"reward_func: an object \(Judge\) has no importable name, which other processes",
        ),
        ("exact", "reward_func: exact: expected file.py:name"),
        ("judges.module:judge", "reward_func: judges.module:judge: expected file.py:name"),
        ("none.py:judge", "reward_func: none.py: no such file"),
        ("none.py", "reward_func: none.py: no such file"),
        ("{two}", r"reward_func: .* has 2 functions \(a, b\); write .*:function"),
        ("{two}:c", "reward_func: .*two.py defines no 'c'"),
        ("{broken}:x", r"reward_func: .*broken\.py: ModuleNotFoundError"),
        ("{two}:number", "reward_func: number is a value of type int, not a function"),
    ],
)
def test_a_reward_function_that_cannot_be_used_is_named(
    reward: Any, message: str, tmp_path: Path
) -> None:
    (tmp_path / "two.py").write_text("number = 1\ndef a(answer, truth): ...\ndef b(x): ...\n")
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    if isinstance(reward, str):
        reward = reward.format(two=tmp_path / "two.py", broken=tmp_path / "broken.py")
    with pytest.raises(ConfigError, match=message):
        check_reward_function(reward)


def test_a_function_of_a_script_without_a_guard_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_a_script(answer: str, truth: Any) -> float:
        return 0.0

    of_a_script.__module__, of_a_script.__qualname__ = "__main__", "of_a_script"
    script = tmp_path / "script.py"
    script.write_text("print('trains')\n")
    monkeypatch.setattr(__main__, "__file__", str(script), raising=False)
    with pytest.raises(
        ConfigError, match=r'move the code that runs script.py under if __name__ == "__main__"'
    ):
        reference_to(of_a_script, "reward_func")
    script.write_text("if __name__ == '__main__':\n    print('trains')\n")
    assert reference_to(of_a_script, "reward_func") == f"{script}:of_a_script"


async def of_words(answer: str, truth: Any) -> str:
    return "good"


def for_mara(answer: str | None, truth: GroundTruth, rollout: Rollout) -> float:
    return float(truth.columns["user"] == rollout.columns["user"] == "mara")


def of_nothing(answer: str, truth: Any) -> float:
    return math.nan


def raises(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str)


def away(answer: str, truth: Any) -> float:
    raise ConnectionRefusedError("no judge")


def whole(answer: str, truth: Any) -> float:
    return float(answer == truth)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            of_words,
            "reward_func: of_words returned a value of type str; it must return a finite number",
        ),
        (of_nothing, "reward_func: of_nothing returned nan; it must return a finite number"),
        (raises, r"reward_func: raises raised ValueError: .*test_arguments\.py:\d+\) on the first"),
        (whole, r"TypeError: compare the answer with truth\.answer.*test_arguments\.py:"),
    ],
)
def test_a_reward_function_is_called_once_before_anything_starts(
    reward: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "questions.jsonl"
    write_questions(ROWS, path, "train_dataset")
    with pytest.raises(ConfigError, match=message):
        check_reward_function(reward, questions=path)
    check_reward_function(good, questions=path)
    check_reward_function(scorer, questions=path)


def test_a_reward_function_is_tried_with_the_columns_of_its_question(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    write_questions([{"query": "Q", "answer": "7", "user": "mara"}], path, "train_dataset")
    check_reward_function(for_mara, questions=path)


async def test_a_reward_function_whose_judge_is_away_is_no_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "questions.jsonl"
    write_questions(ROWS, path, "train_dataset")
    check_reward_function(away, questions=path)
    assert "away could not be tested (ConnectionRefusedError: no judge)" in caplog.text


def test_held_out_data_that_are_the_training_data_are_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, rows in (("a", ROWS), ("b", ROWS), ("c", ROWS[:1])):
        write_questions(rows, tmp_path / name, "train_dataset")
    warn_of_equal_files(tmp_path / "a", tmp_path / "c")
    assert not caplog.text
    warn_of_equal_files(tmp_path / "a", tmp_path / "b")
    assert "contain the same rows" in caplog.text


@dataclass
class Settings:
    max_steps: int = 3


class Model(BaseModel):
    max_steps: int = 3


class Plain:
    def __init__(self) -> None:
        self.max_steps = 3


def test_a_config_may_be_a_file_a_mapping_or_an_object(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("max_steps: 3\n")
    (tmp_path / "c.json").write_text('{"max_steps": 3}')
    forms = [tmp_path / "c.yaml", str(tmp_path / "c.json"), {"max_steps": 3}, ' {"max_steps": 3}']
    for config in (*forms, Settings(), Model(), Plain()):
        assert load_settings(config) == {"max_steps": 3}
    assert load_settings(None) == {}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("none.yaml", "config: none.yaml: No such file"),
        ("config.toml", "config: config.toml: expected a .yaml"),
        (7, "config: a value of type int is not a configuration"),
        ('{{"max_steps": }}', "config is not valid JSON"),
        ("{bad}.yaml", "config: .*bad.yaml is not valid YAML"),
        ("{bad}.json", "config: .*bad.json is not valid JSON"),
        ("{list}.yaml", "config: .*list.yaml: expected `name: value`"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(config: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.yaml").write_text("- 1\n")
    if isinstance(config, str):
        config = config.format(bad=tmp_path / "bad", list=tmp_path / "list")
    with pytest.raises(ConfigError, match=message):
        load_settings(config)


@pytest.mark.parametrize("key", ["actor_rollout_ref", "actor_rollout_ref.model.path"])
def test_the_configuration_of_another_engine_says_which_engine_to_name(key: str) -> None:
    settings = {"data": {}, key: {"model": "m"}}
    with pytest.raises(ConfigError, match='setting of verl: pass train_engine_name="verl"'):
        refuse_settings_of(settings, "agentrl")
    refuse_settings_of(settings, "verl")
    refuse_settings_of({"max_steps": 3}, "agentrl")
