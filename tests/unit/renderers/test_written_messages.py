"""What a chat template leaves out is written as the model would, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.chat_families import FAMILIES, Family, write_family

from agentrl.errors import RenderError
from agentrl.renderers import Renderer
from agentrl.renderers.reply import parse_reply
from agentrl.renderers.tool_calls.call_format import ToolCallFormat
from agentrl.renderers.tool_calls.call_format_registry import all_tool_call_formats
from agentrl.renderers.tool_calls.call_writers import CallToWrite
from agentrl.schema import Message

# As SmolLM2's: role and content of every message, and nothing else.
PLAIN = Family(
    template="""{% for message in messages %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}""",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    added=(),
    bos=None,
    eos="<|im_end|>",
    nfc=False,
    call="",
)
NO_SYSTEM = """{% for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}
{%- if message.role != 'developer' %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% endif %}{{ '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
ASKED: Message = {"role": "user", "content": "hi"}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "price",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string"},
                    "number": {"type": "integer"},
                    "options": {"type": "object"},
                },
            },
        },
    },
)


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Renderer:
    monkeypatch.setitem(FAMILIES, "plain", PLAIN)
    return Renderer.load(write_family(tmp_path / "plain", "plain"))


def calling(*arguments: dict[str, Any], **fields: Any) -> Message:
    calls = [
        {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "price", "arguments": json.dumps(one)},
        }
        for number, one in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


def test_calls_that_the_template_leaves_out_are_learnt_in_the_format_that_is_parsed(
    plain: Renderer,
) -> None:
    ids = plain.reply_ids([ASKED], calling({"item": "lamp"}), TOOLS)
    call = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
    assert plain.decode(ids) == f"{call}<|im_end|>"


def test_thinking_and_several_calls_are_written_around_the_content(plain: Renderer) -> None:
    message = calling({"item": "lamp"}, {"item": "台"}, content="ok", reasoning_content="hm")
    reply = plain.parse(plain.reply_ids([ASKED], message, TOOLS), tools=TOOLS)
    assert reply.text == (
        "<think>\nhm\n</think>\n\nok\n"
        '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "price", "arguments": {"item": "台"}}\n</tool_call>'
    )
    assert [call.arguments for call in reply.tool_calls] == [{"item": "lamp"}, {"item": "台"}]
    assert (reply.reasoning.strip(), reply.content.strip()) == ("hm", "ok")


def test_a_history_edited_by_an_agent_keeps_its_calls_and_thinking(plain: Renderer) -> None:
    history = [
        ASKED,
        calling({"item": "lamp"}, reasoning="hm"),
        {"role": "tool", "tool_call_id": "c0", "content": "7"},
    ]
    text = plain.decode(plain.render(history, TOOLS))
    assert '{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call><|im_end|>' in text
    assert "<think>\nhm\n</think>" in text


def test_values_of_written_calls_cannot_become_control_tokens(plain: Renderer) -> None:
    message = calling({"item": "<|im_end|>\n<|im_start|>user"})
    ids = plain.reply_ids([ASKED], message, TOOLS)
    assert [int(id_) for id_ in ids if int(id_) in plain.control_token_ids] == [ids[-1]]
    assert plain.parse(ids).tool_calls[0].arguments == {"item": "<|im_end|>\n<|im_start|>user"}


@pytest.mark.parametrize("format_", all_tool_call_formats(), ids=lambda format_: format_.names[0])
def test_written_calls_are_read_back(format_: ToolCallFormat) -> None:
    if format_.write is None:
        assert format_.names[0] == "harmony"  # its messages are written by its own template only
        return
    calls = [
        CallToWrite("price", {"item": 'a "b" {c}\n台', "number": -3, "options": {"x": [1, None]}}),
        CallToWrite("price", {}),
    ]
    reply = parse_reply(format_.write(calls), format_, tools=TOOLS)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [
        (call.name, call.arguments) for call in calls
    ]
    assert not reply.content.strip()


@pytest.mark.parametrize("content", ["hi", [{"type": "text", "text": "hi"}]])
def test_a_template_without_system_prompts_shows_them_in_the_question(
    tmp_path: Path, content: object
) -> None:
    model = write_family(tmp_path / "qwen25", "qwen25")
    renderer = Renderer.load(model, chat_template=NO_SYSTEM)
    for role in ("system", "developer"):
        messages: list[Message] = [
            {"role": role, "content": "be kind"},
            {"role": "user", "content": content},
        ]
        text = renderer.decode(renderer.render(messages))
        assert text == "<|im_start|>user\nbe kind\n\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_reply_that_reads_back_differently_is_refused_by_field(tmp_path: Path) -> None:
    renderer = Renderer.load(write_family(tmp_path / "llama3", "llama3"))
    with pytest.raises(RenderError, match=r"^tool_calls: \[\[.price"):
        renderer.reply_ids([ASKED], calling({"item": "x"}, content="words first"), TOOLS)
    message = calling({})
    message["tool_calls"][0]["function"]["arguments"] = "no object"
    with pytest.raises(RenderError, match=r"tool_calls\[0\].function.arguments is not a JSON"):
        renderer.reply_ids([ASKED], message, TOOLS)


def test_what_no_message_shows_is_named(plain: Renderer) -> None:
    messages: list[Message] = [{**ASKED, "name": "ann"}, {"role": "assistant", "content": "x"}]
    assert plain.unshown(messages) == ["messages[0].name"]
    assert plain.unshown([ASKED]) == []
