import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import strategies as st
from support.fuzzing import TryCases

from agentrl.errors import ConfigError
from agentrl.renderers import Reply, ToolCallFormat, register_tool_call_format
from agentrl.renderers.reply import parse_reply
from agentrl.renderers.tool_calls.call_format import CallSection
from agentrl.renderers.tool_calls.call_format_registry import get_tool_call_format

FORMATS = [
    *("hermes", "qwen3_coder", "llama3", "mistral", "kimi_k2", "pythonic"),
    *("deepseekv3", "minicpm", "openai", "glm45"),
    *("lfm2", "gemma4", "minimax_m2", "deepseekv32", "deepseekv4"),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string"},
                    "count": {"type": "integer"},
                    "limit": {"type": ["number", "null"]},
                    "rush": {"type": "boolean"},
                    "tags": {"type": "array"},
                    "ship": {"anyOf": [{"type": "object"}, {"type": "string"}]},
                    "size": {"enum": ["1", "2"]},
                    "shop": {"$ref": "#/$defs/Shop"},
                    "part": {"allOf": [{"$ref": "#/$defs/a~1b"}]},
                    "loop": {"$ref": "#/$defs/Loop"},
                    "away": {"$ref": "https://example.org/schema"},
                },
                "$defs": {
                    "Shop": {"properties": {"id": {"type": "integer"}}, "type": "object"},
                    "a/b": {"type": "integer"},
                    "Loop": {"$ref": "#/$defs/Loop"},
                },
            },
        },
    }
]


def read(format_: str, text: str) -> Reply:
    return parse_reply(text, get_tool_call_format(format_), tools=TOOLS)


def calls(format_: str, text: str) -> list[tuple[str, dict[str, Any], str | None]]:
    return [(c.name, c.arguments, c.format_error) for c in read(format_, text).tool_calls]


def block(value: object) -> str:
    return f"<tool_call>\n{json.dumps(value)}\n</tool_call>"


def gemma(value: object) -> str:
    """Write a value as Gemma 4 does; no text of it may hold the mark of texts."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{gemma(key)}:{gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


def written(format_: str, name: str, arguments: dict[str, Any]) -> str:
    """Write a call as a model of that family does."""
    value = json.dumps(arguments)
    python = f"{name}({', '.join(f'{key}={item!r}' for key, item in arguments.items())})"
    parameters = "".join(
        f"<parameter={key}>\n{item if isinstance(item, str) else json.dumps(item)}\n</parameter>\n"
        for key, item in arguments.items()
    )

    def tagged(mark: str, *, typed: bool) -> str:
        found = ""
        for key, item in arguments.items():
            is_text = f' string="{str(isinstance(item, str)).lower()}"' if typed else ""
            shown = item if isinstance(item, str) else json.dumps(item)
            found += f'<{mark}parameter name="{key}"{is_text}>{shown}</{mark}parameter>\n'
        return f'<{mark}invoke name="{name}">\n{found}</{mark}invoke>'

    dsml = "｜DSML｜"  # noqa: RUF001
    forms = {
        "lfm2": f"<|tool_call_start|>[{python}]<|tool_call_end|>",
        "gemma4": f"<|tool_call>call:{name}{gemma(arguments)}<tool_call|>",
        "minimax_m2": f"<minimax:tool_call>\n{tagged('', typed=False)}\n</minimax:tool_call>",
        "deepseekv32": f"<{dsml}function_calls>\n{tagged(dsml, typed=True)}\n"
        f"</{dsml}function_calls>",
        "deepseekv4": f"<{dsml}tool_calls>\n{tagged(dsml, typed=True)}\n</{dsml}tool_calls>",
        "hermes": block({"name": name, "arguments": arguments}),
        "qwen3_coder": f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
        "llama3": f'<|python_tag|>{{"name": "{name}", "parameters": {value}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "{name}", "arguments": {value}, "id": "a1B2c3D4e"}}]',
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>"
        f"functions.{name}:0<|tool_call_argument_begin|>{value}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "pythonic": f"<|python_start|>[{python}]<|python_end|>",
        "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"  # noqa: RUF001
        f"{name}\n```json\n{value}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
        "minicpm": f"<|tool_call_start|>\n```python\n{python}\n```\n<|tool_call_end|>",
        "glm45": f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n"
            f"<arg_value>{item if isinstance(item, str) else json.dumps(item)}</arg_value>\n"
            for key, item in arguments.items()
        )
        + "</tool_call>",
        "openai": json.dumps(
            {
                "tool_calls": [
                    {
                        "id": "call_x",
                        "type": "function",
                        "function": {"name": name, "arguments": value},
                    }
                ]
            }
        ),
    }
    return forms[format_]


@pytest.mark.parametrize("format_", FORMATS)
def test_every_format_is_read(format_: str) -> None:
    arguments = {
        "item": "a lamp, 'new' \"5\\\"\n</tool_call>[TOOL_CALLS]",
        "count": 2,
        "limit": 3.5,
        "rush": True,
        "tags": ["a", 1, None],
        "ship": {"to": "x"},
    }
    reply = read(format_, written(format_, "price", arguments))
    assert [(c.name, c.arguments, c.format_error) for c in reply.tool_calls] == [
        ("price", arguments, None)
    ]
    assert reply.content.strip() == ""


@pytest.mark.parametrize("format_", [name for name in FORMATS if name != "openai"])
def test_calls_stand_in_order_and_text_around_them_is_kept(format_: str) -> None:
    first, second = (written(format_, name, {"item": name}) for name in ("price", "add"))
    text = f"<think>hm {first}</think>Let me look.\n{first}\n{second}"
    reply = read(format_, text)
    assert [call.name for call in reply.tool_calls] == ["price", "add"]
    assert reply.content.strip() == "Let me look."
    assert reply.reasoning == f"hm {first}"


@pytest.mark.parametrize("format_", FORMATS)
def test_thinking_tags_inside_a_call_do_not_hide_it(format_: str) -> None:
    for tag in ("<think>", "</think>", "<think>x</think>", "<answer>"):
        code = f"print('{tag}')"
        text = "<think>plan</think>" + written(format_, "price", {"item": code})
        assert calls(format_, text) == [("price", {"item": code}, None)]


def test_calls_inside_thinking_are_no_calls() -> None:
    call = written("hermes", "f", {})
    reply = parse_reply(f"<think>{call}</think>x{call}", get_tool_call_format("hermes"), turn=3)
    assert [(c.id, c.name) for c in reply.tool_calls] == [("call_3_0", "f")]
    assert (reply.content, reply.reasoning) == ("x", call)
    assert reply.message == {"role": "assistant", "content": reply.text}


def test_thinking_that_never_ends_does_not_hide_a_call() -> None:
    call = written("hermes", "price", {})
    reply = read("hermes", f"<think>I call <tool_call>it</tool_call> now {call}")
    assert [c.name for c in reply.tool_calls] == ["price"]
    assert reply.reasoning == "I call <tool_call>it</tool_call> now "
    for text in ("<think>no <tool_call>call</tool_call>", f"<think>{call} and so on"):
        assert read("hermes", text).tool_calls == ()
    both = read("hermes", f"<think>{call} or {call}\n{call}")
    assert (len(both.tool_calls), both.reasoning) == (2, f"{call} or ")


def test_what_stands_before_a_closing_tag_without_beginning_was_thought() -> None:
    call = written("hermes", "f", {})
    reply = read("hermes", f"a draft {call}</think>answer")
    assert (reply.tool_calls, reply.content) == ((), "answer")
    reply = read("hermes", f"<think>x</think>{call}</think>")
    assert [c.name for c in reply.tool_calls] == ["f"]


def test_a_closing_tag_inside_a_string_does_not_end_the_call() -> None:
    code = "print('</tool_call>')\n<tool_call>"
    assert calls("hermes", block({"name": "run", "arguments": {"code": code}})) == [
        ("run", {"code": code}, None)
    ]


def test_raw_line_breaks_in_strings_are_read() -> None:
    text = '<tool_call>{"name": "run", "arguments": {"code": "a\nb\tc"}}</tool_call>'
    assert calls("hermes", text) == [("run", {"code": "a\nb\tc"}, None)]


def test_arguments_may_be_json_inside_a_string() -> None:
    text = block({"name": "add", "arguments": '{"a": 1}'})
    assert calls("hermes", text) == [("add", {"a": 1}, None)]


def test_code_may_follow_the_json_in_a_block_of_its_own() -> None:
    code = "print('</code>')\nprint('</tool_call>')"
    text = f'<tool_call>{{"name": "run", "arguments": {{}}}}\n<code>\n{code}\n</code>\n</tool_call>'
    assert calls("hermes", text) == [("run", {"code": code}, None)]
    twice = '<tool_call>{"name": "f", "arguments": {"code": "x"}}<code>y</code></tool_call>'
    assert "given twice" in str(calls("hermes", twice)[0][2])


def test_qwen3_coder_values_are_what_the_schema_says() -> None:
    text = (
        "<tool_call>\n<function=price>\n<parameter=item>\n12\n</parameter>\n"
        "<parameter=count>\n12\n</parameter>\n<parameter=limit>\nnull\n</parameter>\n"
        "<parameter=rush>\nTrue\n</parameter>\n<parameter=ship>\nby air\n</parameter>\n"
        "<parameter=size>\n2\n</parameter>\n<parameter=extra>\n7\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    expected = {"item": "12", "count": 12, "limit": None, "rush": True, "ship": "by air"}
    assert calls("qwen3_coder", text) == [("price", {**expected, "size": "2", "extra": "7"}, None)]


@pytest.mark.parametrize("format_", ["qwen3_coder", "glm45", "minimax_m2"])
def test_types_are_looked_up_where_the_schema_refers_to(format_: str) -> None:
    given = {"shop": {"id": 7}, "part": 3, "loop": "x", "away": "1"}
    assert calls(format_, written(format_, "price", given)) == [("price", given, None)]
    wrong = calls(format_, written(format_, "price", {"part": "three"}))[0]
    assert wrong[2] == "parameter 'part': 'three' is not of type integer"


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": " "}])
def test_a_call_without_arguments_may_be_written_in_any_way(arguments: dict[str, Any]) -> None:
    text = block({"name": "list_items", **arguments})
    assert calls("hermes", text) == [("list_items", {}, None)]


def test_a_deepseek_call_without_a_name_does_not_swallow_the_next_one() -> None:
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
    text = f'{begin}oops{end}{begin}price<｜tool▁sep｜>{{"item": "x"}}{end}'  # noqa: RUF001
    found = calls("deepseekv31", text)
    assert [(name, arguments) for name, arguments, _ in found] == [
        ("", {}),
        ("price", {"item": "x"}),
    ]


def test_qwen3_coder_values_may_hold_its_tags() -> None:
    code = "a </parameter> b\n</function>\n<parameter=x> </tool_call>\n\n  c\n"
    text = written("qwen3_coder", "run", {"code": code, "item": "y"})
    assert calls("qwen3_coder", text) == [("run", {"code": code, "item": "y"}, None)]


def test_mistral_ids_are_nine_alphanumerics_given_or_made() -> None:
    given = '[TOOL_CALLS]price[CALL_ID]Zz3456789[ARGS]{"item": "x"}[TOOL_CALLS]add[ARGS]{"a": 1}'
    reply = parse_reply(given, get_tool_call_format("mistral"), turn=71)
    assert [call.name for call in reply.tool_calls] == ["price", "add"]
    assert reply.tool_calls[0].id == "Zz3456789"
    assert re.fullmatch("[A-Za-z0-9]{9}", reply.tool_calls[1].id)
    made = {
        get_tool_call_format("mistral").call_id(turn, k) for turn in range(99) for k in range(9)
    }
    assert len(made) == 99 * 9
    assert all(re.fullmatch("[a-z0-9]{9}", id_) for id_ in made)
    same = parse_reply(
        '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "Zz3456789"}, '
        '{"name": "f", "arguments": {}, "id": "Zz3456789"}]',
        get_tool_call_format("mistral"),
    )
    assert len({call.id for call in same.tool_calls}) == 2


def test_kimi_ids_are_the_models_own() -> None:
    reply = read("kimi_k2", written("kimi_k2", "price", {}))
    assert (reply.tool_calls[0].name, reply.tool_calls[0].id) == ("price", "functions.price:0")


def test_deepseek_calls_come_with_and_without_fence() -> None:
    text = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>price<｜tool▁sep｜>"  # noqa: RUF001
        '{"item": "```"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'  # noqa: RUF001
    )
    assert calls("deepseekv31", text) == [("price", {"item": "```"}, None)]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[f(class=1, for='x')]", {"class": 1, "for": "x"}),
        ("[f(a=[1, -2.5, (3,)], b={'k': true, \"n\": null})]", None),
        ('[f(a="""two\nlines""", b=r"\\d", c="\\u00e9\\n\\d")]', None),
    ],
)
def test_pythonic_calls_are_read_as_models_write_them(text: str, arguments: Any) -> None:
    expected = {
        "[f(a=[": {"a": [1, -2.5, [3]], "b": {"k": True, "n": None}},
        '[f(a="': {"a": "two\nlines", "b": "\\d", "c": "é\n\\d"},
    }
    assert calls("pythonic", text) == [("f", arguments or expected[text[:6]], None)]


def test_pythonic_names_may_hold_dots_and_hyphens() -> None:
    text = "[shop.get-price(item='x'), add(a=1)]"
    assert [name for name, _, _ in calls("pythonic", text)] == ["shop.get-price", "add"]
    assert calls("pythonic", "[1, 2] is (a) list") == []
    minicpm = "<|tool_call_start|>\n```python\na-b(x=1)\nc(y='d')\n```\n<|tool_call_end|>"
    assert [name for name, _, _ in calls("minicpm", minicpm)] == ["a-b", "c"]


def test_reading_goes_on_behind_a_malformed_call() -> None:
    good = block({"name": "add", "arguments": {}})
    reply = read("hermes", f"<tool_call>oops</tool_call>-{good}-<tool_call>{{{good}")
    assert [call.format_error is None for call in reply.tool_calls] == [False, True, False, True]
    assert reply.content == "--"


PIECES = [
    *("<tool_call>", "</tool_call>", '{"name": "f"', '"arguments": {', "}", ",", '"', "\\", "{"),
    *("<code>", "</code>", "<think>", "</think>", "<function=f>", "<parameter=a>", "</parameter>"),
    *("</function>", "<|python_tag|>", '{"name": "f", "parameters": {}}', ";", "[TOOL_CALLS]"),
    *("[ARGS]", "[CALL_ID]", "f", "[", "]", "(", ")", "a=", "'", '"""', "1", "-", "true", ":"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>", "functions.f:0", "{}"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),  # noqa: RUF001
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "function", "\n```json\n"),  # noqa: RUF001
    *("<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "```python\n", "```"),
    *(
        '{"tool_calls": [',
        '{"function": ',
        "<|tool_call>",
        "call:f{",
        "<tool_call|>",
        '<|"|>',
        "a:",
    ),
    *("<minimax:tool_call>", '<invoke name="f">', '<parameter name="a">', "</invoke>"),
    *("</minimax:tool_call>", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="f">'),  # noqa: RUF001
]


REPLIES = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=24)


@pytest.mark.fuzz(100)
def test_no_text_makes_a_parser_raise(try_cases: TryCases) -> None:
    def check(format_: str, text: str, *, inside: bool) -> None:
        reply = parse_reply(text, get_tool_call_format(format_), starts_inside=inside, tools=TOOLS)
        assert len(reply.content + reply.reasoning) <= len(text)
        ids = [call.id for call in reply.tool_calls]
        assert len(set(ids)) == len(ids)
        for call in reply.tool_calls:
            assert (call.format_error is None) == bool(call.name and call.format_error is None)
            json.dumps(call.model_dump(), ensure_ascii=False).encode()

    formats = st.sampled_from(FORMATS)
    try_cases(check, format_=formats, text=REPLIES.map("".join), inside=st.booleans())


@pytest.mark.parametrize("format_", FORMATS)
def test_a_reply_may_break_off_anywhere(format_: str) -> None:
    text = written(format_, "price", {"item": "a </x> b", "count": 3, "tags": ["]"]})
    for end in range(len(text)):
        for call in read(format_, text[:end] + "\n").tool_calls:
            assert (
                call.format_error is not None
                or call.arguments == read(format_, text).tool_calls[0].arguments
            )


@pytest.mark.parametrize("format_", FORMATS)
def test_a_word_in_the_wrong_place_of_a_call_is_kept_or_told(format_: str) -> None:
    text = written(format_, "price", {"item": "lamp", "shop": {"id": 3}})
    text = re.sub(r'"id": "\w+", |, "id": "\w+"', "", text)  # the call's id is no part of it
    for word in (" odd ", "\nodd\n", '"odd"', ', "x": "odd"', '"x": "odd", ', ", x='odd'", "odd="):
        for position in range(len(text) + 1):
            reply = read(format_, text[:position] + word + text[position:])
            kept = f"{reply.tool_calls} {reply.content}"
            assert "odd" in kept or any(call.format_error for call in reply.tool_calls)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(
    "piece",
    [
        *("<tool_call>", "</think>", "<think>", "[TOOL_CALLS]", '<tool_call>{"name": "f"'),
        *("<|tool_call_start|>[", "<|tool_call>call:f{", '<|tool_call>call:f{a:<|"|>'),
        *("<minimax:tool_call>", '<minimax:tool_call><invoke name="f"><parameter name="a">'),
        '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a">',  # noqa: RUF001
    ],
)
def test_a_reply_is_looked_through_once_however_a_model_stammers(format_: str, piece: str) -> None:
    known = get_tool_call_format(format_)
    text = piece * 500
    looked_through = 0

    def counting(text: str, start: int, tools: Any) -> CallSection | None:
        nonlocal looked_through
        assert known.scan is not None
        section = known.scan(text, start, tools)
        looked_through += (len(text) if section is None else section.end) - start
        return section

    scan = None if known.scan is None else counting
    reply = parse_reply(text, dataclasses.replace(known, scan=scan), tools=TOOLS)
    assert looked_through <= 2 * len(text)
    assert reply == parse_reply(text, known, tools=TOOLS)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@pytest.mark.fuzz(100)
def test_whatever_is_written_well_is_read_as_it_was_meant(try_cases: TryCases) -> None:
    def check(format_: str, arguments: dict[str, Any]) -> None:
        if "\\u0000" in json.dumps(arguments):
            return
        assert calls(format_, written(format_, "f", arguments)) == [("f", arguments, None)]

    typed = ("qwen3_coder", "glm45", "minimax_m2")  # values are what a tool's schema says
    formats = st.sampled_from([name for name in FORMATS if name not in typed])
    names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
    try_cases(check, format_=formats, arguments=st.dictionaries(names, VALUES, max_size=3))


@pytest.mark.parametrize(
    ("template", "format_"),
    [
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("return within <tool_call></tool_call> {{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=p>", "qwen3_coder"),
        ("{{ '<｜tool▁calls▁begin｜>' }}", "deepseekv3"),  # noqa: RUF001
        ("{{ '<|tool_calls_section_begin|>' }}", "kimi_k2"),
        ("{{ '<|tool_call_start|>' }}", "minicpm"),
        ("{{ '<|tool_call_start|>[' + calls }}", "lfm2"),
        ("{{ '<|tool_call>call:' + name }}", "gemma4"),
        ("{{ '<minimax:tool_call>' }}", "minimax_m2"),
        ("{{ '<｜DSML｜function_calls>' }}", "deepseekv32"),  # noqa: RUF001
        ("{{ '<｜DSML｜tool_calls>' }}", "deepseekv4"),  # noqa: RUF001
        ('{"name": function name, "parameters": dictionary of argument name', "llama3"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ message.content }}", "hermes"),
    ],
)
def test_the_chat_template_gives_the_format_away(template: str, format_: str) -> None:
    assert get_tool_call_format("auto", template) is get_tool_call_format(format_)


@pytest.mark.parametrize("format_", FORMATS)
def test_the_example_of_a_format_is_a_call_in_it(format_: str) -> None:
    (call,) = read(format_, get_tool_call_format(format_).example).tool_calls
    assert (call.name, call.format_error) == ("NAME", None)


def test_formats_are_found_by_name() -> None:
    assert get_tool_call_format("qwen25") is get_tool_call_format("hermes")
    with pytest.raises(
        ConfigError, match=r"'llama9'; did you mean 'llama3'\? \(known: apriel, auto"
    ):
        get_tool_call_format("llama9")
    with pytest.raises(ConfigError, match="already registered"):
        register_tool_call_format("qwen", ToolCallFormat())
    with pytest.raises(ConfigError, match="already registered"):
        register_tool_call_format("auto", ToolCallFormat())
    mine = ToolCallFormat(get_tool_call_format("hermes").scan)
    register_tool_call_format("mine", mine)
    assert get_tool_call_format("mine") is mine


@pytest.mark.parametrize(
    ("name", "tool", "rest"),
    [
        ("hermes", "look", ' {"key": "é"}}\n</tool_call>'),
        ("hermes", None, ' "look", "arguments": {"key": "é"}}\n</tool_call>'),
        ("qwen3_coder", "look", "<parameter=key>\né\n</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", None, "look>\n<parameter=key>\né\n</parameter>\n</function>\n</tool_call>"),
        ("llama3", "look", ' {"key": "é"}}'),
        ("llama3", None, ' "look", "parameters": {"key": "é"}}'),
        ("lfm2", "look", "key='é')]<|tool_call_end|>"),
        ("lfm2", None, "look(key='é')]<|tool_call_end|>"),
        ("gemma4", "look", 'key:<|"|>é<|"|>}<tool_call|>'),
        ("gemma4", None, 'look{key:<|"|>é<|"|>}<tool_call|>'),
        (
            *("minimax_m2", "look"),
            '<parameter name="key">é</parameter>\n</invoke>\n</minimax:tool_call>',
        ),
        ("pythonic", "look", 'key="é")]'),
        ("pythonic", None, 'look(key="é")]'),
    ],
)
def test_what_goes_on_from_the_beginning_of_a_call_is_a_call(
    name: str, tool: str | None, rest: str
) -> None:
    format_ = get_tool_call_format(name)
    assert format_.begin is not None
    reply = parse_reply(format_.begin(tool) + rest, format_)
    (call,) = reply.tool_calls
    assert (call.name, call.arguments, call.format_error) == ("look", {"key": "é"}, None)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
        ({"items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, "[1]", [1]),
        ({}, "1", "1"),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "number"}, "3.0", 3.0),
        ({"type": "string"}, "[1]", "[1]"),
    ],
)
def test_a_value_has_the_type_that_its_schema_implies(
    schema: dict[str, Any], text: str, value: object
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    call = (
        f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )
    (read_call,) = parse_reply(call, get_tool_call_format("qwen3_coder"), tools=tools).tool_calls
    assert read_call.arguments == {"a": value}
    assert type(read_call.arguments["a"]) is type(value)
