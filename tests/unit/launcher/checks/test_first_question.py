import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.loading import load_config
from agentrl.launcher.checks.first_question import first_question_lines
from agentrl.launcher.checks.question_checks import check_questions

GSM8K = {"question": "How many lamps?", "answer": "12+1012=1,024\n#### 1,024"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": 'How many? Output the final answer after "####".'}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "8"},
}


def block(tmp_path: Path, row: Any, **flags: Any) -> list[str]:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(row))
    config = load_config({"train_file": str(path), **flags})
    return first_question_lines(config, config.data.train_file)


def test_the_start_shows_how_the_first_row_is_read(tmp_path: Path) -> None:
    head, question, reference, answer = block(tmp_path, GSM8K)
    assert head.endswith("read as GSM8K (the reference is what follows the last ####):")
    assert question == "  question   How many lamps?"
    assert reference == "  reference  1024 (scorer `math`)"
    assert "looked for in \\boxed{}; added to the question: Put the final answer inside" in answer


def test_the_start_shows_the_system_prompt(tmp_path: Path) -> None:
    _, system, question, *_ = block(tmp_path, GSM8K, system_prompt="Be\nbrief.")
    assert (system, question[:12]) == ("  system     Be brief.", "  question  ")


@pytest.mark.parametrize(
    ("row", "flags", "said"),
    [
        (VERL, {}, "looked for in #### ..., as the question or the system prompt asks"),
        (GSM8K, {"answer_instruction": "none"}, "gets no reward"),
        (GSM8K, {"answer_instruction": "Box it."}, "added to the question: Box it."),
        (GSM8K, {"system_prompt": "Use \\boxed{}."}, "as the question or the system prompt asks"),
    ],
)
def test_the_start_says_what_the_model_is_told(
    tmp_path: Path, row: Any, flags: dict[str, Any], said: str
) -> None:
    assert said in block(tmp_path, row, **flags)[-1]


def test_without_a_file_nothing_is_shown() -> None:
    assert first_question_lines(load_config({}), None) == []


async def test_a_row_that_asks_for_another_schema_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(VERL))
    flags = {"train_file": str(path), "default_answer_schema": "answer"}
    notes = await check_questions(load_config(flags), trains=True)
    assert any("(first: line 1) ask for #### ..., and the answer is looked" in one for one in notes)
    assert not await check_questions(load_config({"train_file": str(path)}), trains=True)
