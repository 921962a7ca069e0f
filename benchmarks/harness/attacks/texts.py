"""Texts as a model may write them that take a careless reader long, and the readers of such texts.

The texts repeat a reader's marks, leave them open, or put endless filling behind them.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

from agentrl.renderers.reply import parse_reply
from agentrl.renderers.thinking import split_reasoning
from agentrl.renderers.tool_calls.call_format_registry import get_tool_call_format
from agentrl.rewards import extract_answer
from agentrl.rewards.judge import parse_verdict
from agentrl.rewards.text_scorers import gaia_equal, gaia_reward_func, normalize_text

Reader = Callable[[str], object]

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"p": {"type": "integer"}}}},
    }
]
THINKING = ("<think>", "</think>", "<think></think>", "x</think>")
XML_CALL = "<tool_call><function=f><parameter=p>"
GLM_CALL = "<tool_call>f<arg_key>p</arg_key><arg_value>"
DEEPSEEK_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"  # noqa: RUF001
FORMATS = {
    "harmony": (
        *("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|message|>"),
        *("<|channel|>", " to=functions.f", " to=functions.f<|message|>{", "<|message|>x<|end|>"),
    ),
    "hermes": (
        *("<tool_call>", '<tool_call>{"', '<tool_call>{"name":"f","a":', "</tool_call>"),
        *('<tool_call>{"name":"f"}<code>', "</code>", "<tool_call></tool_call>"),
        '<tool_call>{"name":"f","arguments":{"code":"x"}}<code>',
        '<think><tool_call>{"name":"f"}<code></think>',
    ),
    "qwen3_coder": (
        *("<tool_call>", XML_CALL, f"{XML_CALL}1</parameter>", "</parameter>", "<function="),
        *(f"{XML_CALL}1</parameter></function>", f"<think>{XML_CALL}</think>"),
        "<tool_call><function=f></function></tool_call>",
    ),
    "glm45": (
        *("<tool_call>", GLM_CALL, f"{GLM_CALL}</arg_value>", "<tool_call>f", "</arg_value>"),
        *("<tool_call>f<arg_key>", f"<think>{GLM_CALL}</think>"),
    ),
    "llama3": ("<|python_tag|>", '<|python_tag|>{"name":"f"};', '{"name"', '{"name":1}</think>'),
    "mistral": (
        *("[TOOL_CALLS]", "[TOOL_CALLS]name", "[TOOL_CALLS]name[CALL_ID]", "[TOOL_CALLS]["),
        *("[TOOL_CALLS]name[CALL_ID]a1[ARGS]", "[TOOL_CALLS]f{}", '[TOOL_CALLS]f{"":"'),
    ),
    "openai": ('{"id"</think>', '{"tool_calls":[', '[{"id":1},', '{"id":"', '[{"function":'),
    "kimi_k2": (
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>functions.f:0", "<|tool_call_begin|>functions.f:0 "),
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
        "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|tool_call_end|>x",
    ),
    "deepseekv3": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"),  # noqa: RUF001
        *(DEEPSEEK_CALL, f"{DEEPSEEK_CALL}f\n```", f"{DEEPSEEK_CALL}f\n```json\n{{"),
    ),
    "pythonic": (
        *("<|python_start|>", "<|python_start|>[f(a='", "<|python_start|>[f(a=1)]<|python_end|>"),
        *("[f(", "[f(a=[", "[f(a='\\N{", "[f(a=1, ", "<|python_start|>x<|python_end|>", "[f(),"),
        *("[f</think>", "[f(a='\\x", "[f(a=1"),
    ),
    "minicpm": (
        *("<|tool_call_start|>", "<|tool_call_start|>\n```python\n", "<|tool_call_start|>f();"),
        *("<|tool_call_start|>x<|tool_call_end|>", "<|tool_call_start|>f(a='"),
    ),
}
FILLING = (" ", "\n", "a", "\\", "{", "[", "(", "9", '"', "'", "<", ".", "\u0301\u0316", "\\N{")


def reply_reader(format_: str, *, inside: bool) -> Reader:
    """Return the reader of replies in a format of tool calls."""
    return lambda text: parse_reply(
        text, get_tool_call_format(format_), starts_inside=inside, tools=TOOLS
    )


READERS: dict[str, tuple[Reader, tuple[str, ...]]] = {
    **{name: (reply_reader(name, inside=False), marks) for name, marks in FORMATS.items()},
    "thinking": (split_reasoning, ()),
    "boxed": (
        lambda text: extract_answer(text, "boxed"),
        ("\\boxed", "\\boxed{", "\\boxed{}", "\\boxed {", "\\fbox{", "\\boxed{\\{", "{}", "}"),
    ),
    "answer": (extract_answer, ("<answer>", "</answer>", "<answer></answer>")),
    "first answer": (
        lambda text: gaia_reward_func("", text, "1"),
        ("<answer>", "</answer>", "<answer></answer"),
    ),
    "verdict": (
        parse_verdict,
        (
            "```",
            "```json",
            "```json\n{",
            "correct ",
            "not ",
            "n't",
            '{"verdict":"',
            "正确",
            '{"a":',
        ),
    ),
    "em": (normalize_text, ("a ", "the", "e\u0301", "\ufdfa", "\u0301\u0316")),
    "gaia": (lambda text: gaia_equal(text, "1,x"), (",", "1,", "$", "1e9,")),
}


BEGUN = {f"{name}, begun": (reply_reader(name, inside=True), m) for name, m in FORMATS.items()}


def _of(text: str, end: str = "", begin: str = "") -> Callable[[int], str]:
    return lambda size: begin + repeated(text, size) + end


def _nested(first: str, second: str) -> Callable[[int], str]:
    return lambda size: repeated(first, size // 2) + repeated(second, size // 2)


def hostile_texts(marks: tuple[str, ...]) -> Iterator[tuple[str, Callable[[int], str]]]:
    """Yield a name and a maker of texts of any length."""
    for mark in (*THINKING, *marks):
        yield f"{mark!r} again and again", _of(mark)
        yield f"{mark[:-1]!r} again and again", _of(mark[:-1] or "x")
        yield f"{mark!r} and its end", _of(mark, end="}</answer>")
        for char in FILLING:
            yield f"{mark!r} and {char!r}", _of(char, begin=mark)
            yield f"{mark!r} and {char!r} again and again", _of(mark + 3 * char)
    for first, second in pairwise(marks):
        yield f"{first!r}, {second!r} nested", _nested(first, second)


def repeated(text: str, size: int) -> str:
    """Return a text again and again, up to so many characters."""
    return text * (size // len(text))
