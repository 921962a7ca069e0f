"""Replies made of channels (gpt-oss), and thinking that other marks than `<think>` bound."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat_families import write_family

from agentrl.errors import RenderError
from agentrl.renderers import Renderer, Reply
from agentrl.renderers.reply import parse_reply
from agentrl.renderers.thinking import has_finished_thinking, split_reasoning, without_thinking
from agentrl.renderers.tool_calls.call_format_registry import get_tool_call_format
from agentrl.rewards import extract_answer

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Look up a price.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
        },
    },
)
QUESTION: dict[str, Any] = {"role": "user", "content": "What does the lamp cost?"}
THOUGHT = "<|channel|>analysis<|message|>I look it up.<|end|><|start|>assistant"
ARGUMENTS = '{"item": "lamp"}'
CALLS = {
    "recipient behind the channel": "<|channel|>commentary to=functions.price <|constrain|>json"
    f"<|message|>{ARGUMENTS}",
    "recipient in front": f" to=functions.price<|channel|>commentary json<|message|>{ARGUMENTS}",
}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.load(write_family(tmp_path_factory.mktemp("gpt_oss"), "gpt_oss"))


def read(text: str) -> Reply:
    return parse_reply(text, get_tool_call_format("harmony"), tools=TOOLS)


def test_thinking_and_answer_are_told_apart_by_their_channels() -> None:
    text = f"{THOUGHT}<|channel|>final<|message|>It costs <answer>21</answer>."
    reply = read(text)
    assert (reply.reasoning, reply.tool_calls) == ("I look it up.", ())
    assert reply.content == "It costs <answer>21</answer>."
    assert split_reasoning(text) == (reply.reasoning, reply.content)
    assert without_thinking(text) == reply.content
    assert has_finished_thinking(text)
    assert not has_finished_thinking(THOUGHT.removesuffix("<|end|><|start|>assistant"))
    thought_only = THOUGHT.replace("I look it up.", "<answer>20</answer>")
    assert extract_answer(thought_only + "<|channel|>final<|message|>no") is None


@pytest.mark.parametrize("form", CALLS)
def test_results_are_appended_to_a_call_as_it_was_sampled(renderer: Renderer, form: str) -> None:
    output = renderer.sampled_ids(f"{THOUGHT}{CALLS[form]}<|call|>")
    reply = renderer.parse(output, tools=TOOLS)
    (call,) = reply.tool_calls
    assert (call.name, call.arguments, call.format_error) == ("price", {"item": "lamp"}, None)
    assert reply.message["thinking"] == "I look it up."
    full = np.concatenate([renderer.render([QUESTION], TOOLS), output])
    result = {"role": "tool", "tool_call_id": call.id, "content": "21<|end|>"}
    increment = renderer.extend_prompt(full, [QUESTION, reply.message], [result], TOOLS)
    assert (increment.exact, increment.shared_len) == (True, len(full))
    assert renderer.decode(increment.added_ids) == (
        '<|start|>functions.price to=assistant<|channel|>commentary<|message|>"21<|end|>"<|end|>'
        "<|start|>assistant"
    )


def test_an_answer_loses_its_thinking_as_the_template_says(renderer: Renderer) -> None:
    prompt = renderer.render([QUESTION], TOOLS)
    output = renderer.sampled_ids(f"{THOUGHT}<|channel|>final<|message|>21<|return|>")
    history = [QUESTION, renderer.parse(output).message]
    full = np.concatenate([prompt, output])
    new = [{"role": "user", "content": "And the desk?"}]
    increment = renderer.extend_prompt(full, history, new, TOOLS)
    assert (increment.exact, increment.reason) == (False, "drift")
    fresh = renderer.render([*history, *new], TOOLS)
    np.testing.assert_array_equal(increment.prompt_ids(full), fresh)
    assert "I look it up." not in renderer.decode(fresh)


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        (f"{THOUGHT}{CALLS['recipient in front'][:-1]}", "price", "invalid JSON"),
        (f"{CALLS['recipient in front']} and more", "price", "expected the end of the message"),
        ("<|channel|>commentary to=python code<|message|>print(1)", "python", "JSON object"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(text: str, name: str, error: str) -> None:
    (call,) = read(text).tool_calls
    assert (call.name, call.arguments) == (name, {})
    assert error in (call.format_error or "")


def test_words_beside_a_call_reach_the_template_with_the_thinking(renderer: Renderer) -> None:
    preamble = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
    reply = renderer.parse(
        renderer.sampled_ids(f"{THOUGHT}{preamble}{CALLS['recipient in front']}<|call|>")
    )
    assert reply.content == "One moment."
    assert reply.message["thinking"] == "I look it up.\n\nOne moment."
    result = {"role": "tool", "content": "21"}
    assert "One moment." in renderer.decode(renderer.render([QUESTION, reply.message, result]))


@pytest.mark.parametrize("text", ["plain", "<|channel|>final", "<|channel|>final<|message|>", ""])
def test_a_reply_that_was_cut_off_is_read_and_can_be_continued(
    renderer: Renderer, text: str
) -> None:
    output = renderer.sampled_ids(text)
    message = renderer.parse(output).message
    full = np.concatenate([renderer.render([QUESTION]), output])
    new = [{"role": "user", "content": "Well?"}]
    increment = renderer.extend_prompt(full, [QUESTION, message], new)
    np.testing.assert_array_equal(
        increment.prompt_ids(full), renderer.render([QUESTION, message, *new])
    )


def test_a_call_can_be_forced_and_json_cannot(renderer: Renderer) -> None:
    begun = renderer.decode(renderer.call_beginning("price"))
    (call,) = read(begun + ARGUMENTS).tool_calls
    assert (call.name, call.arguments) == ("price", {"item": "lamp"})
    with pytest.raises(RenderError, match="channels"):
        renderer.json_grammar({"type": "object"})


def test_a_demonstration_becomes_what_the_model_would_have_sampled(renderer: Renderer) -> None:
    reply = {"role": "assistant", "content": "21", "thinking": "Easy."}
    ids = renderer.reply_ids([QUESTION], reply, TOOLS)
    said = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant"
    assert renderer.decode(ids) == f"{said}<|channel|>final<|message|>21<|return|>"


@pytest.mark.parametrize(("thinking", "thought"), [("I look it up.", THOUGHT), ("", "")])
def test_text_beside_a_call_becomes_a_message_of_its_own(
    renderer: Renderer, thinking: str, thought: str
) -> None:
    function = {"name": "price", "arguments": {"item": "lamp"}}
    reply = {
        "role": "assistant",
        "content": "One moment.",
        "thinking": thinking,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    ids = renderer.reply_ids([QUESTION], reply, TOOLS)
    preamble = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
    assert renderer.decode(ids) == f"{thought}{preamble}{CALLS['recipient in front']}<|call|>"
    # As in a rollout, the result follows the tokens of the reply.
    message = renderer.parse(ids, tools=TOOLS).message
    full = np.concatenate([renderer.render([QUESTION], TOOLS), ids])
    result = {"role": "tool", "content": "21"}
    assert renderer.extend_prompt(full, [QUESTION, message], [result], TOOLS).reason is None


@pytest.mark.parametrize(
    ("template", "open_", "close"),
    [
        ("[THINK]{x}[/THINK]", "[THINK]", "[/THINK]"),
        ("<channel|>", "<|channel>thought", "<channel|>"),
    ],
)
def test_other_marks_of_thinking_are_known_from_the_template(
    tmp_path: Path, template: str, open_: str, close: str
) -> None:
    path = write_family(tmp_path, "qwen25")
    source = (path / "tokenizer_config.json").read_text()
    (path / "tokenizer_config.json").write_text(
        source.replace('"chat_template": "', f'"chat_template": "{{# {template} #}}')
    )
    renderer = Renderer.load(path)
    text = f"{open_}\nhm <tool_call>{close}It is 21."
    reply = renderer.parse(renderer.sampled_ids(text))
    assert (reply.reasoning.strip(), reply.content) == ("hm <tool_call>", "It is 21.")
    assert without_thinking(text) == "It is 21."
    assert split_reasoning(text) == (reply.reasoning, reply.content)
    assert split_reasoning(f"{open_}cut off") == ("cut off", "")


def test_a_template_that_shows_no_call_leaves_the_format_to_the_tokens(tmp_path: Path) -> None:
    assert Renderer.load(write_family(tmp_path, "lfm2")).tool_call_format == "lfm2"


def test_marks_that_a_template_puts_together_are_recognised(tmp_path: Path) -> None:
    path = write_family(tmp_path, "qwen25")
    bar = "\uff5c"
    (path / "chat_template.jinja").write_text(
        f"{{%- set mark = '{bar}DSML{bar}' %}}"
        "{%- if tools %}{{- 'Write <' + mark + 'tool_calls>' + (tools | tojson) }}{%- endif %}"
        "{%- for m in messages %}{{- m.role + m.content + '<|im_end|>' }}{%- endfor %}"
    )
    assert Renderer.load(path).tool_call_format == "deepseekv4"
