"""Models' mistakes in calls: what they write is read, or the model is told; none of it is lost."""

import json
from typing import Any

import pytest

from agentrl.renderers.reply import parse_reply
from agentrl.renderers.tool_calls.call_format_registry import (
    all_tool_call_formats,
    get_tool_call_format,
)


def tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("write", path="string", text="string", count="integer"),
    tool("look", where="string"),
    tool("odd name", **{"a key": "string"}),
]
WRITE: tuple[str, Any] = ("write", {"path": "a"})
LOOK: tuple[str, Any] = ("look", {"where": "b"})
BOTH = [WRITE, LOOK]
ANSWER: list[tuple[str, Any]] = []
"""The reply holds no call: all of it is the model's answer."""


def error(reason: str, name: str = "") -> tuple[str, str]:
    return name, reason


def in_hermes(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


def in_coder(inside: str, name: str = "write") -> str:
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def in_glm(inside: str, name: str = "write") -> str:
    return f"<tool_call>{name}\n{inside}</tool_call>"


def in_minimax(inside: str, name: str = "write") -> str:
    return f'<minimax:tool_call><invoke name="{name}">{inside}</invoke></minimax:tool_call>'


def in_dsml(inside: str, name: str = "write") -> str:
    mark = "｜DSML｜"  # noqa: RUF001
    marked = in_minimax(inside, name).replace("minimax:tool_call", f"{mark}tool_calls")
    for tag in ("invoke", "parameter"):
        marked = marked.replace(f"<{tag}", f"<{mark}{tag}").replace(f"</{tag}", f"</{mark}{tag}")
    return marked


def dsml_value(key: str, value: str) -> str:
    return f'<parameter name="{key}" string="true">{value}</parameter>'


def in_gemma(call: str) -> str:
    return f"<|tool_call>call:{call}<tool_call|>"


def in_kimi(name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def in_deepseek(name: str, arguments: str) -> str:
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
    return f"{begin}{name}<｜tool▁sep｜>{arguments}{end}"  # noqa: RUF001


def in_harmony(header: str, arguments: str) -> str:
    return f"<|channel|>commentary {header}<|message|>{arguments}<|call|>"


# Where a JSON object that is one call stands in a reply.
JSON_PLACES = {
    "hermes": "<tool_call>{}</tool_call>",
    "llama3": "<|python_tag|>{}",
    "mistral": "[TOOL_CALLS][{}]",
    "openai": '{{"tool_calls": [{}]}}',
    "lfm2": "<|tool_call_start|>[{}]<|tool_call_end|>",
}
PATH = {"path": "a"}
JSON_CALLS: list[tuple[Any, list[Any]]] = [
    # Other formats' keys.
    ({"name": "write", "parameters": PATH}, [WRITE]),
    ({"name": "write", "args": PATH}, [WRITE]),
    ({"name": "write", "params": PATH}, [WRITE]),
    ({"name": "write", "input": PATH}, [WRITE]),
    ({"name": "write", "arguments": json.dumps(PATH)}, [WRITE]),
    ({"tool": "write", "arguments": PATH}, [WRITE]),
    ({"tool_name": "write", "args": PATH}, [WRITE]),
    ({"function": "write", "parameters": PATH}, [WRITE]),
    ({"type": "function", "name": "write", "arguments": PATH}, [WRITE]),
    ({"type": "tool_use", "id": "1", "name": "write", "input": PATH}, [WRITE]),
    ({"type": "function", "function": {"name": "write", "arguments": PATH}}, [WRITE]),
    ({"id": "1", "index": 0, "function": {"name": "write", "parameters": PATH}}, [WRITE]),
    ({"id": "1", "function": {"name": "write"}}, [("write", {})]),
    ({"content": {"name": "write", "arguments": PATH}}, [WRITE]),
    # Keys that no format has.
    ({"name": "write", "path": "a"}, [error('not "path"; put arguments into "argum', "write")]),
    ({"name": "write", "arguments": PATH, "why": 1}, [error('not "why"; put', "write")]),
    ({"name": "write", "args": PATH, "why": 1}, [error('arguments into "args"', "write")]),
    ({"name": "write", "id": "7"}, [error('not "id"; put arguments into', "write")]),
    ({"name": "write", "type": "text", "arguments": {}}, [error('"type" is "function"', "write")]),
    ({"function": {"name": "write", "arguments": PATH}, "text": "b"}, [error("text", "write")]),
    ({"content": {"name": "write", "arguments": PATH}, "text": "b"}, [error("text", "write")]),
    ({"name": "write", **dict.fromkeys("012345678", 1)}, [error('"3", "4"; put', "write")]),
    # The same thing twice.
    ({"name": "write", "arguments": {}, "parameters": PATH}, [error("arguments twice", "write")]),
    ({"name": "write", "tool": "look", "arguments": {}}, [error("names its tool twice")]),
    (
        {"function": {"name": "write", "arguments": PATH}, "arguments": {}},
        [error('"arguments" both', "write")],
    ),
    # No call.
    ({"arguments": PATH}, [error('needs a "name"')]),
    ({"name": "", "arguments": PATH}, [error('needs a "name"')]),
    ({"name": "write", "arguments": [1]}, [error("must be a JSON object", "write")]),
    ({"name": "write", "arguments": "{} {}"}, [error("one JSON object", "write")]),
]
HERMES = [
    ("write(a)", error("expected a JSON object")),
    ('{"name": "write", }', error("invalid JSON")),
    ('{"name": "write"} x', error("found more text", "write")),
    ('{"name": "write"}{"name": "look"}', error("found more text", "write")),
    ('{"name": "f", "arguments": {"a": NaN}}', error("NaN")),
    ('{"name": "f", "arguments": {"a": 1e999}}', error("too large", "f")),
    (f'{{"name": "f", "arguments": {{"a": {2**70}}}}}', error("64 bits", "f")),
    (f'{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}', error("digits")),
    ('{"name": "f", "arguments": {"a": "\\ud800"}}', error("surrogate", "f")),
    ('{"name": "f", "arguments": {"a\\u0000": 1}}', error("NUL", "f")),
    ('{"name": "f", "arguments": {"a": ' + "[" * 50 + "]" * 50 + "}}", error("nested more", "f")),
    ('{"name": "f", "arguments": {}}<code>x', error("expected </code>", "f")),
    ('{"name": "f", "arguments": {"code": "x"}}<code>y</code>', error("given twice", "f")),
    ('{"name": "f", "arguments": {"a": 1, "a": 2}}', error('"a" is given twice')),
    ('{"name": "f", "arguments": {}, "arguments": {"a": 1}}', error('"arguments" is given twice')),
    ('{"name": "f", "arguments": {"a": {"b": 1, "b": 2}}}', error('"b" is given twice')),
]
W, L = '{"name": "write", "arguments": {"path": "a"}}', '{"name": "look", "args": {"where": "b"}}'
ROWS: dict[str, list[tuple[str, str, list[Any]]]] = {
    "json": [
        (format_, place.format(json.dumps(call)), expected)
        for format_, place in JSON_PLACES.items()
        for call, expected in JSON_CALLS
    ],
    "inside": [("hermes", in_hermes(text), [expected]) for text, expected in HERMES],
    "broken off": [
        ("hermes", '<tool_call>{"name": "write", "arg', [error("invalid JSON")]),
        ("hermes", '<tool_call>{"name": "write"}', [error("found the end of the m", "write")]),
        ("hermes", '<tool_call>{"name": "f", "a": ' + '{"a":' * 5000, [error("nested too deep")]),
        ("llama3", '{"name": "f", "parameters": {', [error("invalid JSON")]),
        ("mistral", "[TOOL_CALLS][" + W, [error("invalid JSON")]),
        ("openai", '{"tool_calls": [{"function": {"name": "f"', [error("invalid JSON")]),
        ("lfm2", '<|tool_call_start|>[{"name": "f"', [error("invalid JSON")]),
        ("minicpm", "<|tool_call_start|>\nwrite(path='a')", [error("the end of the message")]),
        ("pythonic", "[write(path='a)]", [error("a string has no end", "write")]),
        ("gemma4", in_gemma('write{path:<|"|>a}'), [error("a text has no end", "write")]),
        ("minimax_m2", '<minimax:tool_call><invoke name="f">', [error("expected a param", "f")]),
        ("deepseekv3", "<｜tool▁call▁begin｜>f", [error("expected NAME")]),  # noqa: RUF001
        (
            "deepseekv3",
            in_deepseek("write", "{}").partition("}")[0] + "}",
            [error("after the arguments", "write")],
        ),
        ("kimi_k2", in_kimi("functions.write:0", "{]"), [error("invalid JSON", "write")]),
        ("harmony", in_harmony("to=functions.write", '{"path": "a'), [error("invalid", "write")]),
        ("harmony", "<|channel|>commentary to=functions.write", [error("expected <|me", "write")]),
        ("olmo3", "<function_calls>write(path='a')", [error("the end of the message")]),
        ("functionary", '<function=write>{"path": "a"}', [error("expected </function>", "write")]),
        (
            "seed_oss",
            "<seed:tool_call><function=write></function>",
            [error("expected a parameter or </function> and </seed:tool_call>", "write")],
        ),
        (
            "function_gemma",
            "<start_function_call>call:write{path:<escape>a",
            [error("a text has no end", "write")],
        ),
        (
            "hunyuan",
            '<tool_calls><tool_call>function<tool_sep>write\n```json\n{"path": "a"}\n',
            [error("expected ```", "write")],
        ),
        ("granite", f"<|tool_call|>[{W}", [error("invalid JSON")]),
        ("granite", "<|tool_call|>f()", [error("expected a JSON object")]),
        *(
            (name, f"{open_}[{W}]", [error("the end of the message", "write")])
            for name, open_ in {
                "phi4_mini": "<|tool_call|>",
                "jamba": "<tool_calls>",
                "nemotron": "<TOOLCALL>",
                "internlm2": "<|action_start|><|plugin|>",
                "longcat": "<longcat_tool_call>",
                "cohere": "<|START_ACTION|>",
                "command_r": "Action: ```json\n",
            }.items()
        ),
    ],
    "without its tag": [
        (
            "qwen3_coder",
            "<function=write>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>",
            [error("expected <tool_call> in front of <function=write>", "write")],
        ),
        ("qwen3_coder", "The tag is <function=NAME>.", ANSWER),
    ],
    "no call between the marks": [
        ("qwen3_coder", in_hermes('{"name": "f"}'), [error("expected <function=NAME>")]),
        ("qwen3_coder", "<tool_call><function=f></tool_call>", [error("expected a param", "f")]),
        ("llama3", '<|python_tag|>print("x")', [error("expected a JSON object")]),
        ("mistral", "[TOOL_CALLS]call it", [error("expected a JSON object")]),
        ("mistral", "[TOOL_CALLS][]", [error("holds no call")]),
        ("mistral", "[TOOL_CALLS][1]", [error("a call is a JSON object")]),
        ("llama3", '<|python_tag|>{"tool_calls": []}', [error("holds no call")]),
        ("openai", '{"tool_calls": [1]}', [error("a call is a JSON object")]),
        ("kimi_k2", "<|tool_calls_section_begin|>", [error("expected <|tool_call_begin|>")]),
        ("kimi_k2", "<|tool_call_begin|>{}<|tool_call_end|>", [error("expected functions.NAME")]),
        (
            "minicpm",
            "<|tool_call_start|>```python\n```<|tool_call_end|>",
            [error("expected NAME(")],
        ),
        ("lfm2", "<|tool_call_start|>f()", [error("the end of the message")]),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", [error("holds no call")]),
        ("gemma4", "<|tool_call>write{}<tool_call|>", [error("expected call:NAME{")]),
        ("minimax_m2", "<minimax:tool_call>f()", [error("expected an invoke tag")]),
        ("harmony", in_harmony("to=functions.write", "a"), [error("expected a JSON", "write")]),
        ("harmony", in_harmony("functions.write", "{}"), [error("expected to=functions.NAME")]),
        ("pythonic", "<|python_start|>f()<|python_end|>", [error("expected '['")]),
    ],
    "odd name": [
        ("glm45", in_hermes('write{"path": "a"}'), [error("is not the name of a tool")]),
        ("glm45", in_glm("", "write(path='a')"), [error("is not the name of a tool")]),
        ("glm45", in_glm("", "I write a file"), [error("is not the name of a tool")]),
        ("glm45", in_glm("", "odd name"), [("odd name", {})]),
        ("qwen3_coder", in_coder("", '"write"'), [error("is not the name of a tool")]),
        ("qwen3_coder", in_coder("", 'write path="a"'), [error("is not the name of a tool")]),
        ("qwen3_coder", in_coder("", "odd name"), [("odd name", {})]),
        ("minimax_m2", in_minimax("", "write path='a'"), [error("is not the name of a tool")]),
        ("minimax_m2", in_minimax("", "odd name"), [("odd name", {})]),
        ("deepseekv4", in_dsml("", "write(a)"), [error("is not the name of a tool")]),
        ("deepseekv3", in_deepseek('write{"path": "a"}', "{}"), [error("is not the name of a")]),
        ("deepseekv3", in_deepseek("odd name", "{}"), [("odd name", {})]),
        ("kimi_k2", in_kimi("functions.write(a):0", "{}"), [error("is not the name of a tool")]),
        ("gemma4", in_gemma("write(a){}"), [error("is not the name of a tool")]),
        ("harmony", in_harmony('to=functions.write{"a":1}', "{}"), [error("is not the name of")]),
    ],
    "odd argument name": [
        (
            "qwen3_coder",
            in_coder('<parameter=path type="string">\na\n</parameter>\n'),
            [error("is not the name of a parameter", "write")],
        ),
        (
            "qwen3_coder",
            in_coder('<parameter="path">\na\n</parameter>\n'),
            [error("is not the name of a parameter", "write")],
        ),
        (
            "qwen3_coder",
            in_coder("<parameter=a key>\na\n</parameter>\n", "odd name"),
            [("odd name", {"a key": "a"})],
        ),
        (
            "glm45",
            in_glm("<arg_key>path=</arg_key><arg_value>a</arg_value>"),
            [error("is not the name of a parameter", "write")],
        ),
        (
            "minimax_m2",
            in_minimax('<parameter name="path" type="string">a</parameter>'),
            [error("expected a parameter", "write")],
        ),
        (
            "minimax_m2",
            in_minimax('<parameter name="the path">a</parameter>'),
            [error("is not the name of a parameter", "write")],
        ),
        (
            "deepseekv4",
            in_dsml(dsml_value("the path", "a")),
            [error("is not the name of a parameter", "write")],
        ),
        ("gemma4", in_gemma('write{"path":<|"|>a<|"|>}'), [error("name of an argument", "write")]),
    ],
    "an argument without its end": [
        (
            "qwen3_coder",
            in_coder("<parameter=path>\na\n<parameter=text>\nb\n</parameter>\n"),
            [error("'path' has no end", "write")],
        ),
        (
            "qwen3_coder",
            in_coder("<parameter=path>a<parameter=text>b</parameter>"),
            [error("'path' has no end", "write")],
        ),
        (
            "qwen3_coder",
            in_coder("<parameter=path>\na\n<parameter=other>\nb\n</parameter>\n"),
            [error("'path' has no end", "write")],
        ),
        ("qwen3_coder", in_coder("<parameter=path>a"), [error("'path' has no end", "write")]),
        (
            "qwen3_coder",
            in_coder("<parameter=path>a") + in_coder("<parameter=x>b</parameter>", "look"),
            [error("'path' has no end", "write"), ("look", {"x": "b"})],
        ),
        (
            "qwen3_coder",
            in_coder("<parameter=text>Write <parameter=path>a</parameter>.</parameter>"),
            [("write", {"text": "Write <parameter=path>a</parameter>."})],
        ),
        (
            "glm45",
            in_glm(
                "<arg_key>path</arg_key><arg_value>a<arg_key>text</arg_key><arg_value>b</arg_value>"
            ),
            [error("'path' has no end", "write")],
        ),
        (
            "glm45",
            in_glm("<arg_key>path</arg_key><arg_value>a\ntext\n<arg_value>b</arg_value>"),
            [error("'path' has no end", "write")],
        ),
        (
            "glm45",
            in_glm("<arg_key>path</arg_key><arg_value>a")
            + in_glm("<arg_key>where</arg_key><arg_value>b</arg_value>", "look"),
            [error("'path' has no end", "write"), LOOK],
        ),
        (
            "minimax_m2",
            in_minimax('<parameter name="path">a<parameter name="x">b</parameter>'),
            [error("'path' has no end", "write")],
        ),
        (
            "minimax_m2",
            in_minimax('<parameter name="path">a')
            + in_minimax('<parameter name="where">b</parameter>', "look"),
            [error("'path' has no end", "write"), LOOK],
        ),
        (
            "deepseekv4",
            in_dsml('<parameter name="path" string="true">a' + dsml_value("text", "b")),
            [error("'path' has no end", "write")],
        ),
    ],
    "text between arguments": [
        (
            "qwen3_coder",
            in_coder("<parameter=path>a</parameter> and <parameter=text>b</parameter>"),
            [error("'path' has no end", "write")],
        ),
        (
            "qwen3_coder",
            in_coder("I write: <parameter=path>a</parameter>"),
            [error("expected a parameter", "write")],
        ),
        (
            "glm45",
            in_glm(
                "<arg_key>path</arg_key><arg_value>a</arg_value> and "
                "<arg_key>text</arg_key><arg_value>b</arg_value>"
            ),
            [error("'path' has no end", "write")],
        ),
        (
            "minimax_m2",
            in_minimax(
                '<parameter name="path">a</parameter> and <parameter name="text">b</parameter>'
            ),
            [error("'path' has no end", "write")],
        ),
        (
            "deepseekv4",
            in_dsml(dsml_value("path", "a") + " and " + dsml_value("text", "b")),
            [error("'path' has no end", "write")],
        ),
        ("gemma4", in_gemma('write{path:<|"|>a<|"|> b}'), [error("expected ','", "write")]),
        ("pythonic", "[write(path='a' 'b')]", [error("expected ','", "write")]),
        ("kimi_k2", in_kimi("write", "{} x"), [error("after the arguments", "write")]),
        ("deepseekv3", in_deepseek("write", "{} x"), [error("after the arguments", "write")]),
        (
            "harmony",
            in_harmony("to=functions.write", "{} {}"),
            [error("expected the end", "write")],
        ),
        (
            "harmony",
            in_harmony('to=write {"path":1}', "{}"),
            [error("in front of <|mess", "write")],
        ),
        ("harmony", in_harmony("to=write to=look", "{}"), [error("in front of <|mess", "write")]),
    ],
    "an argument twice": [
        ("qwen3_coder", in_coder("<parameter=path>x</parameter>" * 2), [error("twice", "write")]),
        (
            "glm45",
            in_glm("<arg_key>path</arg_key><arg_value>a</arg_value>" * 2),
            [error("given twice", "write")],
        ),
        (
            "minimax_m2",
            in_minimax('<parameter name="path">a</parameter>' * 2),
            [error("twice", "write")],
        ),
        ("deepseekv4", in_dsml(dsml_value("path", "a") * 2), [error("given twice", "write")]),
        (
            "deepseekv4",
            in_dsml('{"path": "a"}' + dsml_value("path", "a")),
            [error("given twice", "write")],
        ),
        ("pythonic", "[f(a=1, a=2)]", [error("given twice", "f")]),
        ("pythonic", "[f(a={'b': 1, 'b': 2})]", [error("'b' is given twice", "f")]),
        (
            "lfm2",
            "<|tool_call_start|>[f(a={'b': 1, 'b': 2})]<|tool_call_end|>",
            [error("'b'", "f")],
        ),
        (
            "minicpm",
            "<|tool_call_start|>f(a={'b': 1, 'b': 2})<|tool_call_end|>",
            [error("'b'", "f")],
        ),
        ("gemma4", in_gemma("f{a:1,a:2}"), [error("given twice", "f")]),
        ("gemma4", in_gemma("f{a:{b:1,b:2}}"), [error("given twice", "f")]),
        ("kimi_k2", in_kimi("f", '{"a": 1, "a": 2}'), [error("given twice", "f")]),
        ("deepseekv3", in_deepseek("f", '{"a": 1, "a": 2}'), [error("given twice", "f")]),
        ("harmony", in_harmony("to=f", '{"a": 1, "a": 2}'), [error("given twice", "f")]),
    ],
    "no value": [
        (
            "qwen3_coder",
            in_coder("<parameter=count>two</parameter>"),
            [error("'two' is not of type integer", "write")],
        ),
        ("pythonic", "[f(a=print('x'))]", [error("a literal value, found 'print'", "f")]),
        ("pythonic", "[f(1)]", [error("expected NAME=VALUE", "f")]),
        ("pythonic", "[f(a=" + "[" * 99, [error("nested too deeply", "f")]),
        ("pythonic", f"[f(a={'9' * 101})]", [error("too many digits", "f")]),
        ("pythonic", "[f(a={1: 2})]", [error("the keys of an object", "f")]),
        ("pythonic", "[f(a=007)]", [error("'007' is not a number", "f")]),
        ("gemma4", in_gemma("f{a:x}"), [error("expected a value", "f")]),
        ("gemma4", in_gemma("f{a:" + "[" * 99), [error("nested too deeply", "f")]),
        (
            "deepseekv4",
            in_dsml('<parameter name="count" string="false">x</parameter>'),
            [error("invalid JSON", "write")],
        ),
    ],
    "further calls": [
        *(("llama3", f"<|python_tag|>{W}{mark}{L}", BOTH) for mark in ("; ", ",", "\n", "")),
        *(("llama3", f"{W}{mark}{L}", BOTH) for mark in ("; ", ",", "\n", "")),
        ("llama3", f"[{W}, {L}]", BOTH),
        ("llama3", f"<|python_tag|>[{W}]\n[{L}]", BOTH),
        ("llama3", f"{W}; and so on", [WRITE, error("a JSON object after ';'")]),
        ("llama3", f'{W}\n{{"x": 1}}', [WRITE, error('needs a "name"')]),
        ("llama3", f"<|python_tag|>{{]<|python_tag|>{W}", [error("invalid JSON"), WRITE]),
        ("mistral", f"[TOOL_CALLS]{W}{L}", BOTH),
        ("mistral", f"[TOOL_CALLS][{W}]\n[{L}]", BOTH),
        ("mistral", f"[TOOL_CALLS]{W}, {L}", BOTH),
        ("mistral", '[TOOL_CALLS]write{"path": "a"}look{"where": "b"}', BOTH),
        ("mistral", f'[TOOL_CALLS]write[ARGS]{{"path": "a"}}{L}', BOTH),
        ("mistral", '[TOOL_CALLS]write{"path": "a"}f[ARGS]{}', [WRITE, ("f", {})]),
        ("openai", f'{{"tool_calls": [{W}]}}\n{{"tool_calls": [{L}]}}', BOTH),
        ("openai", f"[{W}]\n[{L}]", BOTH),
        ("openai", f"{W}\n{L}", BOTH),
        ("pythonic", "[write(path='a')]\n[look(where='b')]", BOTH),
        ("pythonic", "[write(path='a')], [look(where='b')]", BOTH),
        (
            "pythonic",
            "<|python_start|>[write(path='a')][look(where='b')]<|python_end|>",
            BOTH,
        ),
        (
            "lfm2",
            "<|tool_call_start|>[write(path='a')][look(where='b')]<|tool_call_end|>",
            [error("expected <|tool_call_end|>", "write")],
        ),
        ("gemma4", in_gemma("f{}call:g{}"), [error("expected '<tool_call|>'", "f")]),
        ("hermes", in_hermes(W) + in_hermes(L), BOTH),
    ],
    "keys beside the calls": [
        ("openai", f'{{"tool_calls": [{W}], "text": "b"}}', [error('beside "tool_calls": "text"')]),
        ("openai", f'{{"content": "hi", "tool_calls": [{W}]}}', [error('"tool_calls": "content"')]),
        ("openai", f'{{"role": "assistant", "content": null, "tool_calls": [{W}]}}', [WRITE]),
        ("openai", f'{{"tool_calls": {W}}}', [WRITE]),
        ("llama3", f'{{"tool_calls": [{W}]}}', [WRITE]),
        ("openai", '{"tool_calls": [{"function": "write"}]}', [("write", {})]),
    ],
    "no marks": [
        (format_, text, expected)
        for format_ in ("llama3", "openai")
        for text, expected in [
            (W, [WRITE]),
            ('\n{"type": "function", "name": "f", "parameters": {}}', [("f", {})]),
            ('{"function": "write", "parameters": {"path": "a"}}', [WRITE]),
            ('{"name": "write", "args": {"path": "a"}}', [WRITE]),
            ('{"tool": "write", "input": {"path": "a"}}', [WRITE]),
            ('{"arguments": {"path": "a"}, "name": "write"}', [WRITE]),
            ('{"name": "write", "parameters": "{\\"path\\": \\"a\\"}"}', [WRITE]),
            ('{"function": {"name": "write", "arguments": {"path": "a"}}}', [WRITE]),
            ('{"name": "write", "args": [1]}', [error("must be a JSON object", "write")]),
            (f"[{W}, 1]", [WRITE, error("a call is a JSON object")]),
            (f'[{W}, {{"x": 1}}]', [WRITE, error('needs a "name"')]),
            ('{"name": "Ada", "age": 3}', ANSWER),
            ('{"name": "Ada", "input": {"path": "a"}}', ANSWER),
            ('{"name": "GPT", "parameters": 175}', ANSWER),
            ('{"name": "GPT", "parameters": "175 billion"}', ANSWER),
            ('{"tool": "write", "why": "it writes"}', ANSWER),
            ('[{"name": "Ada"}, {"name": "write"}]', ANSWER),
            ('{"type": "function", "function": "x squared"}', ANSWER),
            ('[{"tool_calls": [1]}]', [error('needs a "name"')]),
            ('{"tool_calls": 3}', ANSWER),
            ('{"content": "It is done.", "tool_calls": []}', ANSWER),
            ('{"name": "Ada", }', ANSWER),
            ("[1, 2]", ANSWER),
            ("{}", ANSWER),
            ("[]", ANSWER),
            (f"I say {W}", ANSWER),
        ]
    ],
}


@pytest.mark.parametrize(
    ("format_", "text", "expected"),
    [
        pytest.param(*row, id=f"{kind}-{row[0]}-{number}")
        for kind, rows in ROWS.items()
        for number, row in enumerate(rows)
    ],
)
def test_what_a_model_writes_in_a_call_is_read_or_an_error(
    format_: str, text: str, expected: list[tuple[str, Any]]
) -> None:
    reply = parse_reply(text, get_tool_call_format(format_), tools=TOOLS)
    found = [(call.name, call.format_error or call.arguments) for call in reply.tool_calls]
    assert [name for name, _ in found] == [name for name, _ in expected], found
    for (_, outcome), (_, wanted) in zip(found, expected, strict=True):
        is_told = isinstance(outcome, str) and isinstance(wanted, str) and wanted in outcome
        assert is_told or outcome == wanted, found
    assert all(not call.arguments for call in reply.tool_calls if call.format_error)
    assert reply.content.strip() == ("" if expected else text)


def test_every_format_has_its_mistakes_in_the_table() -> None:
    tried = {get_tool_call_format(row[0]) for rows in ROWS.values() for row in rows}
    built_in = {format_ for format_ in all_tool_call_formats() if format_.names}
    assert built_in - tried == {get_tool_call_format("deepseekv32")}  # as deepseekv4
