import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from examples.shop.demonstrations import TOOL_SCHEMAS
from examples.shop.episodes import Codec, call_text
from examples.shop.tokenizer import MARKUP_TOKENS, SPECIAL_TOKENS

MODEL = Path(__file__).resolve().parents[3] / "assets" / "demo" / "model"
RAW = Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@settings(deadline=None)
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    ids = RAW.encode(text, add_special_tokens=False).ids
    assert RAW.decode(ids, skip_special_tokens=False) == text


def test_random_unicode_and_bytes_round_trip() -> None:
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(chr(draw.randint(1, 0xD7FF)) for _ in range(50))
        text += draw.randbytes(40).decode("latin-1")
        ids = RAW.encode(text, add_special_tokens=False).ids
        assert RAW.decode(ids, skip_special_tokens=False) == text


def test_digits_are_single_tokens() -> None:
    assert len(RAW.encode("1234567890").ids) == 10


def test_each_markup_literal_is_one_token_of_its_own() -> None:
    ids = [RAW.encode(token).ids for token in SPECIAL_TOKENS + MARKUP_TOKENS]
    assert all(len(one) == 1 for one in ids)
    assert len({one[0] for one in ids}) == len(ids)
    assert RAW.get_vocab_size() <= 1000


def test_transformers_and_tokenizers_agree(tokenizer: PreTrainedTokenizerBase) -> None:
    for text in (
        "tea: cost after 3 off?",
        call_text("add", {"a": 12, "b": 3}),
        "é\u0301 <x>\t\n",
    ):
        assert tokenizer(text).input_ids == RAW.encode(text).ids
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_model_fits_the_vocabulary_and_stops_at_the_end_of_a_turn(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    config = (MODEL / "config.json").read_text()
    assert f'"vocab_size": {RAW.get_vocab_size()}' in config
    assert f'"eos_token_id": {tokenizer.eos_token_id}' in config


def test_first_prompt_and_turns_are_short(tokenizer: PreTrainedTokenizerBase) -> None:
    codec = Codec(tokenizer)
    assert len(codec.prompt("rice: what do 3 packs cost?")) <= 155
    assert len(codec.encode(call_text("multiply", {"a": 12, "b": 3}))) + 1 <= 14
    assert len(codec.encode(call_text("price", {"item": "rice"}))) + 1 <= 10


MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "tea: what do 3 packs cost?"},
    {"role": "assistant", "content": call_text("price", {"item": "tea"})},
    {"role": "tool", "content": "12"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "multiply", "arguments": {"a": 12, "b": 3}}}
        ],
    },
    {"role": "tool", "content": "36"},
    {"role": "tool", "content": "37"},
    {"role": "assistant", "content": "<think>so</think><answer>36</answer>"},
    {"role": "user", "content": "Thanks."},
]


@pytest.mark.parametrize("tools", [None, TOOL_SCHEMAS])
@pytest.mark.parametrize("first", [0, 1])
def test_appending_a_message_only_appends_text(
    tokenizer: PreTrainedTokenizerBase, tools: Any, first: int
) -> None:
    def render(count: int, *, generate: bool) -> str:
        text = tokenizer.apply_chat_template(
            MESSAGES[first:count], tools=tools, add_generation_prompt=generate, tokenize=False
        )
        assert isinstance(text, str)
        return text

    for count in range(first + 1, len(MESSAGES)):
        longer = render(count + 1, generate=False)
        assert longer.startswith(render(count, generate=False))
        if MESSAGES[count]["role"] == "assistant":
            assert longer.startswith(render(count, generate=True))


def test_structured_calls_render_like_sampled_ones(tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"name": "price", "arguments": {"item": "tea"}}
    sampled: Any = {"role": "assistant", "content": call_text("price", {"item": "tea"})}
    structured: Any = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call}],
    }
    question = {"role": "user", "content": "?"}
    one, two = (
        tokenizer.apply_chat_template([question, message], tokenize=False)
        for message in (sampled, structured)
    )
    assert one == two


def test_tools_stand_in_the_system_message_as_json(tokenizer: PreTrainedTokenizerBase) -> None:
    tools: Any = TOOL_SCHEMAS
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], tools=tools, tokenize=False
    )
    assert isinstance(text, str)
    system = text.split("<|im_end|>")[0]
    assert '{"type": "function", "function": {"name": "price"' in system
