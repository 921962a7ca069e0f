"""TRL's side of the benchmark of a pretrained model reads the same tokens as AgentRL's."""

import json
import shutil
from pathlib import Path

import pytest
from real_model_trl import check_tokens, load_tokenizer, score

DEMO = Path(__file__).parents[3] / "assets/demo/model"
CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}\
{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As SmolLM2's: without tools and calls."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The demo's tokenizer without tokens for calls, and with a template that knows no tools."""
    for file in DEMO.glob("*.json"):
        shutil.copy(file, tmp_path)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [
        token for token in tokenizer["added_tokens"] if "tool_call" not in token["content"]
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    return tmp_path


def test_both_sides_render_a_conversation_with_calls_alike(model: Path) -> None:
    check_tokens(model, load_tokenizer(model))


def test_a_template_without_calls_is_noticed(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = CHATML
    with pytest.raises(AssertionError):
        check_tokens(model, tokenizer)


async def test_the_last_message_is_scored() -> None:
    replies = [
        "<answer> 55</answer>",
        "<answer>5</answer>",
        "55",
        "<answer>1</answer><answer>55</answer>",
    ]
    completions = [[{"content": "<answer>0</answer>"}, {"content": reply}] for reply in replies]
    assert await score(completions, ["55"] * 4) == [1.0, 0.0, 0.0, 1.0]
