import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.renderers import register_tool_call_parser
from agentrl.renderers.tool_calls import get_tool_call_parser, parse_hermes


def block(value: object) -> str:
    return f"<tool_call>\n{json.dumps(value)}\n</tool_call>"


def test_calls_are_read_in_order_and_taken_out_of_the_text() -> None:
    first = block({"name": "price", "arguments": {"item": "lamp"}})
    second = block({"name": "add", "arguments": {"a": 1, "b": [2.5, None, True]}})
    text, calls = parse_hermes(f"Let me look.{first}\n{second} Done.")
    assert text == "Let me look.\n Done."
    assert [(call.name, call.arguments, call.format_error) for call in calls] == [
        ("price", {"item": "lamp"}, None),
        ("add", {"a": 1, "b": [2.5, None, True]}, None),
    ]


def test_a_closing_tag_inside_a_string_does_not_end_the_call() -> None:
    code = "print('</tool_call>')\n<tool_call>"
    _, calls = parse_hermes(block({"name": "run", "arguments": {"code": code}}))
    assert [call.arguments for call in calls] == [{"code": code}]


def test_raw_line_breaks_in_strings_are_read() -> None:
    _, calls = parse_hermes(
        '<tool_call>{"name": "run", "arguments": {"code": "a\nb\tc"}}</tool_call>'
    )
    assert calls[0].arguments == {"code": "a\nb\tc"}


def test_arguments_may_be_json_inside_a_string() -> None:
    _, calls = parse_hermes(block({"name": "add", "arguments": '{"a": 1}'}))
    assert (calls[0].arguments, calls[0].format_error) == ({"a": 1}, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>price(lamp)</tool_call>", "expected a JSON object"),
        ('<tool_call>{"name": "price", }</tool_call>', "invalid JSON"),
        ('<tool_call>{"name": "price", "arg', "invalid JSON"),
        ('<tool_call>{"name": "price"}', "found the end of the message"),
        ('<tool_call>{"name": "price"} x</tool_call>', "found more text"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'needs a "name"'),
        ('<tool_call>{"name": ""}</tool_call>', 'needs a "name"'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be a JSON object"),
        ('<tool_call>{"name": "f", "arguments": "{} {}"}</tool_call>', "one JSON object"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "too large"),
        (f'<tool_call>{{"name": "f", "arguments": {{"a": {2**70}}}}}</tool_call>', "64 bits"),
        (f'<tool_call>{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>', "digits"),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogate"),
        ('<tool_call>{"name": "f", "arguments": {"a\\u0000": 1}}</tool_call>', "NUL"),
        ('<tool_call>{"name": "f", "arguments": ' + '{"a":' * 5000, "nested too deeply"),
        (block({"name": "f", "arguments": {"a": json.loads("[" * 50 + "]" * 50)}}), "nested more"),
    ],
)
def test_a_malformed_call_says_why(text: str, reason: str) -> None:
    _, calls = parse_hermes(text)
    assert len(calls) == 1
    assert reason in (calls[0].format_error or "")


def test_reading_goes_on_behind_a_malformed_call() -> None:
    good = block({"name": "add", "arguments": {}})
    text, calls = parse_hermes(f"<tool_call>oops</tool_call>-{good}-<tool_call>{{{good}")
    assert [call.format_error is None for call in calls] == [False, True, False, True]
    assert text == "--"


@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                [
                    "<tool_call>",
                    "</tool_call>",
                    '{"name": "f"',
                    '"arguments": {',
                    "}",
                    ",",
                    '"',
                    "\\",
                ]
            ),
            st.text(max_size=5),
        ),
        max_size=20,
    ).map("".join)
)
def test_no_text_makes_the_parser_raise(text: str) -> None:
    rest, calls = parse_hermes(text)
    assert text.count("<tool_call>") >= len(calls)
    assert "<tool_call>" not in rest


def test_parsers_are_found_by_name() -> None:
    assert get_tool_call_parser("qwen25") is get_tool_call_parser("hermes")
    with pytest.raises(ConfigError, match=r"unknown tool-call parser 'llama9' \(known: hermes"):
        get_tool_call_parser("llama9")
    with pytest.raises(ConfigError, match="already registered"):
        register_tool_call_parser("qwen", lambda text: (text, []))
